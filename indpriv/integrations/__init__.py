"""Other training loops, trackers and federated strategies; imported only when they are used."""
