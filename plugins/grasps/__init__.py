"""Grasps of a dexterous hand, generated for clouds of points."""
