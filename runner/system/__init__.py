"""Foundations of all other packages: errors, files, hardware, random generators, secrets."""
