"""Seeds made of several numbers."""

import hashlib
from collections.abc import Sequence

import numpy as np


def mixed_seed(*parts: int | str) -> int:
    """A seed of 63 bits that differs wherever one of its parts differs, also where seeds of users are consecutive.

    Args:
        parts: what the seed is of, such as a user's seed and the number of a sample.

    Example:
        >>> mixed_seed(0, 1) == mixed_seed(1, 0), mixed_seed(0, 1) == mixed_seed(0, 1)
        (False, True)
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def turn_seed(seed: int, prompt: Sequence[int], num_before: int = 0) -> int:
    """The seed of a turn. It depends on what the turn follows, not on its number: parallel calls come in any order, and
    a turn that is asked for again is the same.

    Args:
        seed: that of the episode.
        prompt: the tokens before the turn.
        num_before: how many turns of the episode follow the same tokens already.
    """
    digest = hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).digest()[:8]
    return mixed_seed(seed, int.from_bytes(digest, "big"), num_before) % 2**32
