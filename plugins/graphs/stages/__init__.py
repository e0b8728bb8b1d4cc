"""Stages for learners on graphs."""
