"""Three tips on training with DP: weight decay and a batch size that grows on Adult, augmentations on MNIST."""
