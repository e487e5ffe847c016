"""Memory estimates of a training step from tensor sizes, without a device and without weights."""
