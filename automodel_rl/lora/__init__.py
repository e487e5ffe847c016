"""Low-rank adapters: on linear layers, and in PEFT's files."""
