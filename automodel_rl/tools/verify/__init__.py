"""`automodel-rl verify`: compares a layout with one process of plain transformers."""
