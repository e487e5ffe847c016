"""Brings tokens to the ranks of their experts, and results back.

A token travels once to every rank that has any of its experts, however many these are, and the weighted sum over them
comes back. With ep = 2 and 8 experts of a token, that is a quarter of what its 8 slots would be.

Shape letters: n tokens of this rank, K experts of a token, R ranks, S rows sent, A rows that arrive, H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.parallel.collectives import AllToAll, all_to_all

ADDED = 2
"""Rows of zeros that follow on all that arrives. Their only expert is this rank's last one, with weight 0. They change
nothing, and compiled layers need no graph for a rank that gets no tokens or one."""


class TakeRows(torch.autograd.Function):
    """Copies of rows, [n, H] to [s, H].

    torch's own backward of an index adds gradients up one by one, for it does not know where a row was copied to. Here
    it is a gather and a sum.

    Args (of `apply`):
        tensor: [n, H].
        source_s: the row that each copy is of, int64.
        place_nJ: the places of each row's copies, int64. A row with fewer copies has places whose gradients are 0.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source_s: Tensor, place_nJ: Tensor) -> Tensor:
        ctx.save_for_backward(place_nJ)
        return tensor[source_s]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place_nJ,) = ctx.saved_tensors
        return gradients[0][place_nJ].sum(1), None, None


class SumRows(torch.autograd.Function):
    """Sums of rows, [s, H] to [n, H]: what `TakeRows` does backward. A place that stands for no row has zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source_s: Tensor, place_nJ: Tensor) -> Tensor:
        ctx.save_for_backward(source_s)
        return tensor[place_nJ].sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (source_s,) = ctx.saved_tensors
        return gradients[0][source_s], None, None


@dataclass(frozen=True, eq=False)
class Exchange:
    """The way of one microbatch's tokens in one layer.

    Attributes:
        sent, received: number of rows to and from every rank.
        tokens: the token of each row sent, and of `ADDED` more, int64 [S + ADDED].
        rows: each token's row for each rank, int64 [n, R]; the first added one if the rank has none of its experts.
        num_slots: number of pairs of a token that arrives and an expert of this rank, without the added ones.
        group: the ranks that share the experts.
    """

    sent: list[int]
    received: list[int]
    tokens: Tensor
    rows: Tensor
    num_slots: int
    group: dist.ProcessGroup


# Outside of graphs: the compiler would leave out an exchange whose result has no elements on one of the ranks.
@torch.compiler.disable
def send(
    hidden_nH: Tensor, experts_nK: Tensor, weights_nK: Tensor, num_experts: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Exchange]:
    """Sends tokens to the ranks of their experts.

    Returns:
        Hidden states [A + ADDED, H] of the tokens that arrived here, their experts [A + ADDED, K] as numbers on this
        rank (for one that is elsewhere, the number of experts here), their weights (0 for those), and the way back.
    """
    own_experts = num_experts // group.size()
    exchange = _exchange(experts_nK // own_experts, group)
    sent, received = exchange.sent, exchange.received
    arrived = [
        AllToAll.apply(TakeRows.apply(tensor, exchange.tokens, exchange.rows), sent, received, ADDED, group)
        for tensor in (hidden_nH, weights_nK)
    ]
    experts = all_to_all(experts_nK.int()[exchange.tokens], sent, received, group, ADDED)
    experts = experts - group.rank() * own_experts
    experts[len(experts) - ADDED :] = own_experts
    is_here = (experts >= 0) & (experts < own_experts)
    weights = torch.where(is_here, arrived[1], 0)
    experts = torch.where(is_here, experts, own_experts)
    experts[len(experts) - ADDED :, 0] = own_experts - 1
    return arrived[0], experts.long(), weights, exchange


def _exchange(rank_nK: Tensor, group: dist.ProcessGroup) -> Exchange:
    """Plans the way of tokens to the ranks `rank_nK`.

    The numbers depend on the data, so the host waits for the device once in each layer.
    """
    num_ranks, device = group.size(), rank_nK.device
    slots_Rn = (rank_nK == torch.arange(num_ranks, device=device)[:, None, None]).sum(2)
    is_sent_Rn = slots_Rn > 0
    numbers_R2 = torch.stack([is_sent_Rn.sum(1), slots_Rn.sum(1)], 1)
    one_each = [1] * num_ranks
    theirs_R2 = all_to_all(numbers_R2, one_each, one_each, group)
    sent, received, slots = torch.cat([numbers_R2[:, :1], theirs_R2], 1).T.tolist()
    num_rows = sum(sent)
    row_Rn = torch.where(is_sent_Rn, is_sent_Rn.flatten().cumsum(0).view_as(is_sent_Rn) - 1, num_rows)
    tokens_Rn = torch.arange(rank_nK.shape[0], device=device).expand(num_ranks, -1)
    token_S = torch.zeros(num_rows + ADDED, dtype=torch.int64, device=device)
    token_S.scatter_(0, row_Rn.flatten(), tokens_Rn.flatten())
    token_S[num_rows:] = 0  # every token without a row has written to the first of these
    return Exchange(sent, received, token_S, row_Rn.T.contiguous(), sum(slots), group)


@torch.compiler.disable
def send_back(sums_AH: Tensor, exchange: Exchange) -> Tensor:
    """Returns each token's sums over the experts of a rank to the token's own, as rows [S + ADDED, H] for `SumRows`."""
    return AllToAll.apply(sums_AH, exchange.received, exchange.sent, ADDED, exchange.group)
