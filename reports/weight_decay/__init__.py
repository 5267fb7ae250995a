"""Whether more weight decay than usual helps with DP-SGD: Adult, three runs of each."""
