"""Frozen weights in few bits: nf4 and the linear layers that hold them."""
