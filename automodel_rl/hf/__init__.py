"""Hugging Face checkpoints: names of their tensors, reading, writing, and buckets of tensors."""
