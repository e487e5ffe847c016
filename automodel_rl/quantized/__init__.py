"""Quantized tensors: frozen weights and the layers that hold them, optimizer moments, and rounding of master
weights."""
