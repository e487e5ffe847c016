"""`automodel-rl verify`: a layout against one process of plain transformers."""
