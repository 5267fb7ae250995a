"""Label differential privacy on MNIST: accuracy, and a guess of labels below its ceiling."""
