"""What an example's trajectory counts: in how many steps it met which one-step mechanism."""
