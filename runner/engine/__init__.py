"""The training loop and what guards, times and saves it."""
