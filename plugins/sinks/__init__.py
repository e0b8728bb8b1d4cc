"""Sinks that ship: files of values, and TensorBoard."""
