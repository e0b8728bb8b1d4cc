"""Builds, verifies and measures a trained model with the stages of a recipe's `inference`."""
