"""Rewards: functions that score completions, each in its own process."""
