"""Radiance fields that are trained on images with known poses."""
