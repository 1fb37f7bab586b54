"""Intervals, tests, power and bounds, all clustered by problem."""
