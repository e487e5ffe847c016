"""Sends tokens to the ranks of their experts, and results back.

A token is sent once to every rank with any of its experts, and the weighted sum over them comes back. With ep = 2 and
8 experts per token, that is a quarter of the traffic of its 8 slots.

Shape letters: n tokens of this rank, K experts of a token, R ranks, S rows sent, A rows that arrive, H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.parallel.collectives import AllToAll, all_to_all

ADDED = 2
"""Zero rows appended to the arriving ones. Their only expert is this rank's last one, with weight 0. They change
nothing, but spare compiled layers a graph for ranks that receive no tokens or one."""


class TakeRows(torch.autograd.Function):
    """Copies rows, [n, H] to [s, H]. The backward is a gather and a sum; torch's own adds gradients one by one.

    Args (of `apply`):
        source_s: source row of each copy, int64.
        place_nJ: indices of each row's copies, int64. Rows with fewer copies have indices whose gradients are 0.
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
    """Sums rows, [s, H] to [n, H]: the backward of `TakeRows`. Indices without a row refer to zeros."""

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
    """The routing of one microbatch's tokens in one layer.

    Attributes:
        sent, received: number of rows to and from every rank.
        tokens: the token of each sent row, and of `ADDED` more, int64 [S + ADDED].
        rows: each token's row for each rank, int64 [n, R]; the first added one if the rank has none of its experts.
        num_slots: number of (arriving token, expert of this rank) pairs, without the added ones.
    """

    sent: list[int]
    received: list[int]
    tokens: Tensor
    rows: Tensor
    num_slots: int
    group: dist.ProcessGroup


# Outside of graphs: the compiler would drop an exchange whose result is empty on one of the ranks.
@torch.compiler.disable
def send(
    hidden_nH: Tensor, experts_nK: Tensor, weights_nK: Tensor, num_experts: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Exchange]:
    """Sends tokens to the ranks of their experts.

    Returns:
        Hidden states [A + ADDED, H] of the arriving tokens; their experts' indices on this rank, [A + ADDED, K], with
        the number of local experts for those elsewhere; their weights, 0 for those; and the plan for the way back.
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
    """Plans sending tokens to the ranks `rank_nK`. The row counts depend on the data, so the host waits for the
    device once per layer."""
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
    token_S[num_rows:] = 0  # tokens without a row have written to the first of these
    return Exchange(sent, received, token_S, row_Rn.T.contiguous(), sum(slots), group)


@torch.compiler.disable
def send_back(sums_AH: Tensor, exchange: Exchange) -> Tensor:
    """Returns each token's sums over a rank's experts to the token's rank, as rows [S + ADDED, H] for `SumRows`."""
    return AllToAll.apply(sums_AH, exchange.received, exchange.sent, ADDED, exchange.group)
