"""What the scores of an attack prove: overall, by group and by epsilon."""
