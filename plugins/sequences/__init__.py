"""Sequences of symbols, and what comes next."""
