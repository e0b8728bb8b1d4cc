"""Checkpoints: packed, written and read back."""
