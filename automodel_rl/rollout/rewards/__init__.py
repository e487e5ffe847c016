"""Rewards: functions that score completions, each in a process of its own."""
