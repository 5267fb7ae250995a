"""Federated runs: who is protected from whom."""
