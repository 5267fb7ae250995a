"""What would lower the epsilons of a group: more noise, a lower clipping norm, more records."""
