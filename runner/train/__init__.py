"""One training: assembled, stepped, watched, saved and resumed."""
