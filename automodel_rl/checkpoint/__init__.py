"""Checkpoints to resume from on any layout. They are written in the background of training, and visible once
complete."""
