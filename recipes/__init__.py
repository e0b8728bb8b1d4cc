"""Recipes that ship with the runner, found by bare name."""
