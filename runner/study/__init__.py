"""Search: a recipe handed to Optuna, trial by trial in child processes that may fail."""
