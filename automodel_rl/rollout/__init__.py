"""Completions: generators that write them, rewards that score them, and the weights that generators get."""
