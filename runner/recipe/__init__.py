"""Recipes: read, merged, validated, and locked beside a run."""
