"""Layers that mix tokens other than by attention: by a state, or by a convolution."""
