"""Tokens on their way to experts of other ranks: each once to a rank, and the numbers of one process."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_rl.launch.process_group import join_process_group
from automodel_rl.mixture.expert_exchange import ADDED, send
from automodel_rl.mixture.experts import experts_forward
from tests.rank_pool import RankPool

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 8, 3, 5, 4
TOKENS = (6, 1, 9, 4)
"""Tokens of each rank."""


def module_of(first: int, count: int, group: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, dtype=torch.float64, generator=generator)
    down = torch.randn(NUM_EXPERTS, HIDDEN, INNER, dtype=torch.float64, generator=generator)
    return SimpleNamespace(
        gate_up_proj=up[first : first + count].requires_grad_(),
        down_proj=down[first : first + count].requires_grad_(),
        act_fn=nn.functional.silu,
        _apply_gate=lambda x: nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        num_experts=NUM_EXPERTS,
        is_transposed=False,
        has_gate=True,
        has_bias=False,
        ep_group=group,
        named_children=list,  # no adapters
    )


def inputs_of(rank: int, chosen: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts and their weights of a rank's tokens."""
    generator = torch.Generator().manual_seed(1 + rank)
    count = TOKENS[rank]
    allowed = {"any": NUM_EXPERTS, "first ranks'": TOP_K}[chosen]  # the others then get no tokens at all
    experts = torch.rand(count, allowed, generator=generator).argsort(1)[:, :TOP_K]
    hidden = torch.randn(count, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(count, TOP_K, dtype=torch.float64, generator=generator).requires_grad_()
    return hidden, experts, weights


def backward(output: Tensor) -> None:
    (output * torch.arange(1, output.numel() + 1).view_as(output).sin()).sum().backward()


def exchange(chosen: str, ep: int) -> dict[str, Any]:
    join_process_group(ep)
    group = dist.group.WORLD
    assert group is not None
    own, rank = NUM_EXPERTS // ep, group.rank()
    module, (hidden, experts, weights) = module_of(rank * own, own, group), inputs_of(rank, chosen)
    output = experts_forward(module, hidden, experts, weights)
    backward(output)
    way = send(hidden.detach(), experts, weights.detach(), NUM_EXPERTS, group)[-1]
    return {
        "results": [output.detach(), hidden.grad, weights.grad],
        "experts": [module.gate_up_proj.grad, module.down_proj.grad],
        "sent": way.sent,
        "tokens": way.tokens[: len(way.tokens) - ADDED],
    }


@pytest.mark.parametrize("chosen", ["any", "first ranks'"])
@pytest.mark.parametrize("ep", [2, 4])
def test_results_and_gradients_are_those_of_one_process(ranks: RankPool, ep: int, chosen: str) -> None:
    found = ranks(ep).run(exchange, chosen, ep)
    module = module_of(0, NUM_EXPERTS, None)
    for rank in range(ep):
        hidden, experts, weights = inputs_of(rank, chosen)
        output = experts_forward(module, hidden, experts, weights)
        backward(output)
        torch.testing.assert_close(found[rank]["results"], [output.detach(), hidden.grad, weights.grad])
        owners = [{int(e) // (NUM_EXPERTS // ep) for e in of_token} for of_token in experts]
        tokens = [[token for token, ranks in enumerate(owners) if rank in ranks] for rank in range(ep)]
        assert found[rank]["sent"] == [len(of_rank) for of_rank in tokens]
        assert found[rank]["tokens"].tolist() == list(itertools.chain(*tokens))
    for place, gradient in enumerate((module.gate_up_proj.grad, module.down_proj.grad)):
        torch.testing.assert_close(torch.cat([of_rank["experts"][place] for of_rank in found]), gradient)
