"""Low-rank adapters on linear layers and experts, and their PEFT files."""
