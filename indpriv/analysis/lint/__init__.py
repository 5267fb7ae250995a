"""Settings of DP-SGD compared with what the literature says about them, before or after a run."""
