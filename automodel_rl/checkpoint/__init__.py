"""Checkpoints to resume from, on any layout. They are written while training goes on, and visible when complete."""
