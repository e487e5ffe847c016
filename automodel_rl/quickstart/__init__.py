"""The demo, with a small model and generated data."""
