"""What README.md shows of the demo."""
