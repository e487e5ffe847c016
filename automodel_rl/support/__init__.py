"""Supported combinations: limits of attention backends, and a table of which features work together."""
