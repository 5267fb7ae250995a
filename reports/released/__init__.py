"""What attackers of the released model reach: the page, its figures and its command."""
