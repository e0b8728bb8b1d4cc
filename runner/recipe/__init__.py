"""Recipes: reading, merging, validation, and the lock of a run."""
