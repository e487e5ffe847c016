"""What holds with which versions of torch, transformers, vLLM and Python: `make versions`."""
