"""Hugging Face checkpoints: tensor names, reading, writing, and buckets of tensors."""
