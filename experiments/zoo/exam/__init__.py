"""Misleading speed-ups with known sources, honest changes beside them, and the methods that judge both."""
