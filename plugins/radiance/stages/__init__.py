"""Stages of the radiance-field GAN."""
