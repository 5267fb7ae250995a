"""Accounts of one log in blocks: of examples, or of units with several rows. Sensitive."""
