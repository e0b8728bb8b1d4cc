"""Stages for learners of grasps."""
