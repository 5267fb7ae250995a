"""What `indpriv demo` trains: a network on UCI Adult (CC BY 4.0, see ADULT_ATTRIBUTION.txt)."""
