"""Forward and backward of microbatches on any layout, up to the gradients of an optimizer step."""
