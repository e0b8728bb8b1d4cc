"""Stages: one switchable speed-up or memory saving a file."""
