"""Stages of multi-agent SAC alone."""
