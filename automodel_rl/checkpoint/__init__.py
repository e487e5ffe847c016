"""Checkpoints to resume from: complete or invisible, on any layout, written while training goes on."""
