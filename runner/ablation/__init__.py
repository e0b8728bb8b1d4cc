"""Measures the gain of each stage on this machine."""
