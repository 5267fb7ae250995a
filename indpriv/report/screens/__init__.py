"""What commands print of what they read: blocks for a terminal. Sensitive."""
