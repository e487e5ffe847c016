"""Running a step: microbatches through a model on any layout, forward and backward."""
