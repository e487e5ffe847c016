"""Rollouts: generators that write completions, rewards that score them, and the start of weight syncs."""
