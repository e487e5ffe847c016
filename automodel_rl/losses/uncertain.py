"""The tokens at which a policy is most uncertain, over a whole step (Wang et al., arXiv:2506.01939)."""

from collections.abc import Sequence

import torch
from torch import Tensor

UNCERTAIN = "uncertain"
"""Name of values: 1 for tokens that have a policy term, and 0 for others, [T]."""


def uncertain_tokens(entropies: Sequence[Tensor], masks: Sequence[Tensor], share: float) -> list[Tensor]:
    """Whether each token of each row is among those with the highest entropies of all rows.

    Args:
        entropies: the policy's entropy over each token of each row, [n].
        masks: the tokens that count, bool [n].
        share: the share of counted tokens that are asked for; the quantile between two of them is interpolated.

    Returns:
        float64 [n] for each row, 1 or 0.

    Example:
        >>> import torch
        >>> uncertain_tokens([torch.tensor([9.0, 1.0, 3.0])], [torch.tensor([False, True, True])], 0.5)
        [tensor([0., 0., 1.], dtype=torch.float64)]
    """
    counted = torch.cat([of_row[mask] for of_row, mask in zip(entropies, masks, strict=True)]).double().sort().values
    if not len(counted):
        return [torch.zeros(len(mask), dtype=torch.float64) for mask in masks]
    place = (1 - share) * (len(counted) - 1)
    low = int(place)
    high = min(low + 1, len(counted) - 1)
    bound = torch.lerp(counted[low], counted[high], place - low)
    return [((of_row >= bound) & mask).double() for of_row, mask in zip(entropies, masks, strict=True)]
