"""Findings as a page, as Markdown and as a screen."""
