"""Intervals, tests and correlations that say when they are undefined."""
