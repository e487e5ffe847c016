"""Frozen weights in few bits: nf4, and the linear layers and experts that hold them."""
