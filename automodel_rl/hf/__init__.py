"""Hugging Face checkpoints: names of their tensors, reading, writing, and tensors in packed buckets."""
