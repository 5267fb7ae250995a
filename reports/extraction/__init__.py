"""Parts of reports/extraction.md."""
