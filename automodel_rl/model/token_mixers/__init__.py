"""Layers that mix tokens by a recurrent state or a convolution instead of attention."""
