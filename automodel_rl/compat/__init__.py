"""The only uses of private names of torch, transformers and nemo_automodel."""
