"""What the commands of several pages share."""
