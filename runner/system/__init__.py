"""What the rest stands on: errors, files, hardware, random generators, secrets."""
