"""Parts of reports/extraction/README.md."""
