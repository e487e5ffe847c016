"""Policies: a single program passes rows and gets results in row order, while all ranks serve its calls."""
