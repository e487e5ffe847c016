"""`automodel-rl plan`: the memory that a layout needs, computed without GPUs and without weights."""
