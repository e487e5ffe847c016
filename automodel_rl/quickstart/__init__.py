"""The small model and data of the demo."""
