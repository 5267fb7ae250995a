"""Every claim and every printed cell of the five papers, with its word: one page over all others."""
