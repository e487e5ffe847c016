"""Numbers in few bits: frozen weights and the layers that hold them, moments of optimizers, rounding of masters."""
