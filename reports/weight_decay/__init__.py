"""Whether more weight decay than usual helps with DP-SGD: a fifth of MNIST, three runs of each."""
