"""What is supported: facts of model families and attention backends, and the table of what works together."""
