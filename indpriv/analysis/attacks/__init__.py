"""What the scores of attacks prove, overall, by group and by epsilon."""
