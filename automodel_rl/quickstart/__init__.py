"""The demo, with a small model and data."""
