"""Recipes in child processes."""
