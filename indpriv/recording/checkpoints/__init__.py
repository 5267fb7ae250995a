"""Saved checkpoints replayed into a NormLog: found, read without running them, measured."""
