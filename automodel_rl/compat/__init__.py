"""Private names of torch, transformers and nemo_automodel: used here only, with the versions they were checked with."""
