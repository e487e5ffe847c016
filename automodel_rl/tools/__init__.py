"""Commands beside training: verify and plan for layouts, export and verify-checkpoint for checkpoints."""
