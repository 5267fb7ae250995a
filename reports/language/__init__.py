"""Membership and extraction of the same secrets from a small language model, with DP and without."""
