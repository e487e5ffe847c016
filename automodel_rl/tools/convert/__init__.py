"""Converts configs and command lines of other trainers."""
