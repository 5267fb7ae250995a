"""Figures as inline SVG, drawn from bins and group means: no single example is in them."""
