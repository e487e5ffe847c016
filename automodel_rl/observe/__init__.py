"""Monitoring of runs: metrics, trackers, console output, and the run directory."""
