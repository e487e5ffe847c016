"""Completions: engines that write them, rewards that score them, and the weights that engines get."""
