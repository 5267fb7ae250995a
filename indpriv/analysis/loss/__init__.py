"""Epsilon and the loss of the final model."""
