"""Stages for learners with convolutions."""
