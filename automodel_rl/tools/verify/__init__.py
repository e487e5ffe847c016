"""`automodel-rl verify`: compares a layout with plain transformers in one process."""
