"""Noise, clipping and accuracy over training."""
