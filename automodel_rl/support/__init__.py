"""What is supported: facts about model families and attention backends, and the table of what works together."""
