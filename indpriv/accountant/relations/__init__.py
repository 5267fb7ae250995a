"""Accounts under other relations and samplers than add/remove with secret Poisson sampling."""
