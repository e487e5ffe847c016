"""Estimates of the memory of a training step, from the sizes of tensors, without a device and without weights."""
