"""Uses of private names of torch, transformers and nemo_automodel. Other rooms use none."""
