"""Per-example gradient norms before clipping: backends, their choice, and the checks of a model."""
