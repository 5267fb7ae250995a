"""What `make attacks` runs: attacks on audited runs and on studies, and the page of their figures."""
