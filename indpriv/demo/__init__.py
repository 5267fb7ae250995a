"""What `indpriv demo` trains: a network on UCI Adult (CC BY 4.0, see ADULT_ATTRIBUTION.txt)."""

from indpriv.errors import check_installed

check_installed("Demo runs", "opacus", "torch", "opacus")
