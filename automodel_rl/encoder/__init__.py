"""Encoders of a multimodal model: their work in a step, and the bridge to the language model."""
