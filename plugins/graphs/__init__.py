"""Learners on graphs, and their data."""
