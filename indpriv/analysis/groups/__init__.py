"""Who is worse off: epsilon, loss and accuracy by group."""
