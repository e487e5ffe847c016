"""Running an optimizer step up to its gradients: microbatches through a model on any layout, forward and backward."""
