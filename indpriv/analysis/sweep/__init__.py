"""Audits of one file under several settings and seeds, beside each other."""
