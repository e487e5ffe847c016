"""Routers of both libraries follow routes: their choice is replaced, their weights are of the live scores."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automodel_rl.batch import Routes, TokenSequence, local_microbatch, pack_microbatch
from automodel_rl.batch.microbatch_scope import MicrobatchScope
from automodel_rl.mixture.router_replay import RouterReplay, Selection
from automodel_rl.mixture.routers import install_router_forwards
from tests.needs import needs_nemo

HIDDEN, EXPERTS, TOP_K, TOKENS, LAYER = 8, 12, 3, 10, 5

GATES: dict[str, dict[str, Any]] = {
    "softmax, then top-k": {"score_func": "softmax", "softmax_before_topk": True, "norm_topk_prob": True},
    "top-k, then softmax": {"score_func": "softmax", "softmax_before_topk": False},
    "sigmoid with bias and groups": {
        "score_func": "sigmoid_with_bias",
        "n_expert_groups": 4,
        "n_limited_groups": 2,
        "force_e_score_correction_bias": True,
        "norm_topk_prob": True,
        "route_scale": 2.5,
    },
}


def make_gate(kind: str) -> Any:
    from nemo_automodel.components.moe.config import MoEConfig
    from nemo_automodel.components.moe.layers import Gate

    settings = {"n_expert_groups": 0, "n_limited_groups": 0, "norm_topk_prob": False, "route_scale": 1.0}
    config = MoEConfig(
        **{
            "dim": HIDDEN,
            "inter_dim": 8,
            "moe_inter_dim": 8,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 0,
            "n_activated_experts": TOP_K,
            "train_gate": True,
            "gate_bias_update_factor": 0.0,
            "aux_loss_coeff": 0.0,
            "dtype": torch.float64,
            **settings,
            **GATES[kind],
        }
    )
    gate = Gate(config, gate_precision=torch.float64)
    nn.init.normal_(gate.weight)
    if gate.e_score_correction_bias is not None:
        nn.init.normal_(gate.e_score_correction_bias)
    return gate


def expected_weights(gate: Any, hidden: Tensor, chosen: Tensor, kind: str) -> Tensor:
    """The formulas of the three kinds, written out."""
    logits = hidden @ gate.weight.T
    if kind == "softmax, then top-k":
        weights = logits.softmax(1).gather(1, chosen)
        return weights / weights.sum(1, keepdim=True)
    if kind == "top-k, then softmax":
        return logits.gather(1, chosen).softmax(1)
    weights = logits.sigmoid().gather(1, chosen)
    return 2.5 * weights / weights.sum(1, keepdim=True)


def routed_microbatch() -> Any:
    """A microbatch of which one token has no route."""
    experts = torch.rand(TOKENS, 1, EXPERTS).argsort(2)[..., :TOP_K].short()
    experts[4] = -1
    sequence = TokenSequence(
        torch.arange(TOKENS), torch.ones(TOKENS, dtype=torch.bool), routes=Routes((LAYER,), experts)
    )
    return local_microbatch(pack_microbatch([sequence]))


def replay_of(gate: Any, scope: MicrobatchScope) -> RouterReplay:
    """Makes a gate follow routes, without counting its load."""
    gate.watched = SimpleNamespace(count=lambda output: output)
    replay = RouterReplay({LAYER: gate}, EXPERTS, scope)
    install_router_forwards([gate])
    return replay


@needs_nemo
@pytest.mark.parametrize("kind", GATES)
def test_gates_of_nemo_automodel_follow_routes(kind: str) -> None:
    torch.manual_seed(0)
    gate, scope, microbatch = make_gate(kind), MicrobatchScope(), routed_microbatch()
    hidden, real = torch.randn(TOKENS, HIDDEN, dtype=torch.float64), torch.ones(TOKENS, dtype=torch.bool)
    live = gate(hidden, real, None)[1]
    replay = replay_of(gate, scope)
    assert torch.equal(gate(hidden, real, None)[1], live)  # without a microbatch
    scope.microbatch = microbatch
    weights, chosen, _ = gate(hidden, real, None)
    target = microbatch.routes.of(LAYER).long()
    assert torch.equal(chosen, torch.where(target < 0, live, target))
    torch.testing.assert_close(weights, expected_weights(gate, hidden, chosen, kind), rtol=1e-9, atol=1e-12)
    weights.square().sum().backward()
    got = gate.weight.grad.clone()
    gate.weight.grad = None
    expected_weights(gate, hidden, chosen, kind).square().sum().backward()
    torch.testing.assert_close(got, gate.weight.grad, rtol=1e-9, atol=1e-12)
    differs, routed = replay.differing()[LAYER].tolist()
    moved = sum(set(live[t].tolist()) != set(target[t].tolist()) for t in range(TOKENS) if t != 4)
    assert (differs, routed) == (moved, TOKENS - 1)
    assert moved > 0


class Layer(nn.Module):
    """A router whose choice is what the layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.router = make_gate("softmax, then top-k")

    def forward(self, hidden: Tensor, *, microbatch: Any) -> Tensor:
        return self.router(hidden, torch.ones(len(hidden), dtype=torch.bool), None)[1]


@needs_nemo
def test_deep_copies_follow_routes_on_their_own() -> None:
    torch.manual_seed(0)
    part = SimpleNamespace(layer=Layer(), scope=MicrobatchScope())
    part.scope.follow({LAYER: part.layer})
    part.replay = replay_of(part.layer.router, part.scope)
    twin = copy.deepcopy(part)
    nn.init.normal_(twin.layer.router.weight)
    hidden, microbatch = torch.randn(TOKENS, HIDDEN, dtype=torch.float64), routed_microbatch()
    one, other = part.layer(hidden, microbatch=microbatch), twin.layer(hidden, microbatch=microbatch)
    has_route = microbatch.routes.of(LAYER)[:, 0] >= 0
    assert torch.equal(other[has_route], microbatch.routes.of(LAYER)[has_route].long())
    assert not torch.equal(one[~has_route], other[~has_route])  # its own weights choose there
    assert twin.replay.differing()[LAYER][1] == part.replay.differing()[LAYER][1] == TOKENS - 1


@pytest.mark.parametrize("calls", [0, 2])
def test_a_router_that_does_not_choose_once_is_noticed(calls: int) -> None:
    scores = torch.randn(TOKENS, EXPERTS)
    selection = Selection(lambda live: live, torch.Size((TOKENS, TOP_K)), EXPERTS)
    with pytest.raises(RuntimeError, match=f"3 experts for each of 10 tokens once, but did so {calls} times"):
        call_topk(selection, scores, calls)


def call_topk(selection: Selection, scores: Tensor, calls: int) -> None:
    with selection:
        scores.topk(TOP_K + 1)
        scores[:, :4].topk(TOP_K)  # of groups
        for _ in range(calls):
            torch.topk(scores, TOP_K)
