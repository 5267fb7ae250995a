"""How far an estimate lies from exact epsilons, and how much of it depends on choices."""
