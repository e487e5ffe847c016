"""Trainers: each reads from top to bottom."""
