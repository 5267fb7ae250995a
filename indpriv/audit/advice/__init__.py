"""Advice to a curator, from runs. Sensitive."""
