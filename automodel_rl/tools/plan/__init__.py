"""`automodel-rl plan`: what a layout needs, worked out without GPUs and without weights."""
