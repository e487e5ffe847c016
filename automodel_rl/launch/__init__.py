"""Starts ranks, joins them in process groups, and finds the first cause when a rank fails."""
