"""Seeds derived from several numbers."""

import hashlib
from collections.abc import Sequence

import numpy as np


def mixed_seed(*parts: int | str) -> int:
    """Returns a seed of 63 bits: a hash of the parts, such as a user's seed and the number of a sample.

    Example:
        >>> mixed_seed(0, 1) == mixed_seed(1, 0), mixed_seed(0, 1) == mixed_seed(0, 1)
        (False, True)
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def turn_seed(seed: int, prompt: Sequence[int], num_before: int = 0) -> int:
    """Returns the seed of a turn. It depends on the tokens before the turn, not on its number: parallel calls come in
    any order, and a repeated request gives the same turn. `num_before` turns of the episode already follow the same
    tokens."""
    digest = hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).digest()[:8]
    return mixed_seed(seed, int.from_bytes(digest, "big"), num_before) % 2**32
