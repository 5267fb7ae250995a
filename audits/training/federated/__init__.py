"""Reference runs of federated learning: rows divided among clients, rounds, recorded."""
