"""Training compared with its own recomputation, both ways, while it trains. Sensitive."""
