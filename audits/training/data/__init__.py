"""Data that ships with the package: UCI Adult, CC BY 4.0 (see ADULT_ATTRIBUTION.txt)."""
