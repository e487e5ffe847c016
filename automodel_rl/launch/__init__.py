"""Ranks and process groups: starting them, joining them, and the first cause when one fails."""
