"""Trained weights on their way to generators: packed, overlapped, from the ranks that own them."""
