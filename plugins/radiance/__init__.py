"""Radiance fields that are learnt from images with known poses."""
