"""The log of a run: recording writes it, accounting reads it. Sensitive."""
