"""Clipping other than flat: each example at its own level, and under a privacy filter."""
