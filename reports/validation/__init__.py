"""What `make validate` runs: studies, and the page of their figures."""
