"""Label differential privacy on Adult: accuracy, and a guess of labels below its ceiling."""
