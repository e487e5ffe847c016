"""`automodel-rl plan`: memory and time of a layout, computed without GPUs or weights."""
