"""Sinks that ship: files of values, TensorBoard, and Weights & Biases."""
