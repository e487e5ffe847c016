"""Trained weights on their way to rollout engines: packed, overlapped, from the ranks that own them."""
