"""Router replay: tokens go to the experts that a generator chose for them, and routers still learn.

This is R3 (arXiv:2510.11370). Scores of generator and trainer differ by rounding. Near a tie, that sends a token to
another expert, and probabilities then differ by much more. So the generator's choice is repeated. The weights of the
chosen experts are still the router's own, and receive gradients as usual.

Routers of transformers and nemo_automodel choose by one `torch.topk` over all experts, and take weights from the
returned values or indices. Only the result of this call is replaced; scaling, biases and groups stay the model's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from automodel_rl.batch.microbatch_scope import MicrobatchScope
from automodel_rl.batch.routes import MISSING, Routes
from automodel_rl.mixture.routers import sum_over_stage
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout

DIFFERS = "replay/differs"
"""Metric: the share of tokens with a route that the router itself would have sent to another expert."""


class RouterReplay:
    """Makes a part's routers follow the routes, if any, of the microbatch that their layer computes."""

    def __init__(self, routers: dict[int, Any], num_experts: int, scope: MicrobatchScope):
        self.num_experts, self.scope, self.layers = num_experts, scope, tuple(routers)
        self._noted: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        for number, router in routers.items():
            router.replayed = Replayed(self, number)

    def start_step(self) -> None:
        self._noted = {}

    @torch.no_grad()
    def note(self, number: int, live: Tensor, target: Tensor, is_known: Tensor) -> None:
        """Records for `differing` the tokens that a layer's router would have sent to other experts.

        Args:
            live, target: experts [t, K] of every token, by the router and by the token's route.
            is_known: which tokens have a route, bool [t, 1].
        """
        microbatch = self.scope.microbatch
        assert microbatch is not None
        if (number, microbatch.index) in self._noted:  # a recomputation is not counted again
            return
        differs = (live[:, :, None] != target[:, None]).all(2).any(1)
        self._noted[number, microbatch.index] = differs, is_known[:, 0], microbatch.is_routed

    def differing(self) -> dict[int, Tensor]:
        """Returns counts by layer since the last call, float32 [2], in training: tokens with a route that the router
        would have sent to another expert, and all tokens with a route."""
        counts = {number: torch.zeros(2) for number in self.layers}
        for number in self.layers:
            noted = [kept for (layer, _), kept in self._noted.items() if layer == number]
            if noted:
                differs, is_known, is_real = (torch.cat(column) for column in zip(*noted, strict=True))
                is_routed = is_known & is_real
                counts[number] = torch.stack([(differs & is_routed).sum(), is_routed.sum()]).float()
        self._noted = {}
        return counts


def replay_metrics(replays: list[RouterReplay], layout: Layout) -> dict[str, float]:
    """Returns `DIFFERS` over all layers and per layer, equal on every rank; empty if no token had a route. A
    collective."""
    own = sum_over_stage({n: counts for replay in replays for n, counts in replay.differing().items()}, layout)
    stages = gather_objects({number: counts.tolist() for number, counts in own.items()}, layout.pp_control)
    counts = {number: pair for stage in stages for number, pair in stage.items() if pair[1]}
    if not counts:
        return {}
    differing, routed = (sum(column) for column in zip(*counts.values(), strict=True))
    return {
        DIFFERS: differing / routed,
        **{f"{DIFFERS}_layer_{n}": counts[n][0] / counts[n][1] for n in sorted(counts)},
    }


class Replayed:
    """Makes the router of layer `number` follow routes."""

    def __init__(self, replay: RouterReplay, number: int):
        self.replay, self.number = replay, number

    @property
    def routes(self) -> Routes | None:
        """Routes of the current microbatch; None if the router chooses."""
        microbatch = self.replay.scope.microbatch
        return None if microbatch is None else microbatch.routes

    @torch.compiler.disable  # uses a mode that intercepts function calls
    def follow(self, routes: Routes, router: nn.Module, choose: Callable[..., Any], *args: Any) -> Any:
        """Returns the router's output with the experts of the routes. `choose` is the router's forward, `args` its
        arguments."""
        target = routes.of(self.number).long()
        is_known = target[:, :1] != MISSING

        def answer(live: Tensor) -> Tensor:
            return torch.where(is_known, target, live)

        with Selection(answer, target.shape, self.replay.num_experts) as selection:
            result = choose(router, *args)
        if router.training and torch.is_grad_enabled():
            self.replay.note(self.number, selection.live, target, is_known)
        return result


class Selection(TorchFunctionMode):
    """A context in which a router takes other experts than those with the largest scores.

    Args:
        choose: maps the experts [t, K] that the router would take to those to take instead.

    Raises:
        RuntimeError: at the end, unless experts were chosen exactly once.
    """

    def __init__(self, choose: Callable[[Tensor], Tensor], shape: torch.Size, num_experts: int):
        super().__init__()
        self.choose, self.shape, self.num_experts = choose, shape, num_experts
        self.found: list[Tensor] = []
        self.unmasked: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.masked_fill and args[0].shape[-1] == self.num_experts:
            self.unmasked = args[0]  # a route may lead to a group of experts that the router excludes
        if func not in (torch.topk, Tensor.topk):
            return result
        if args[0].shape[-1] != self.num_experts or result[1].shape != self.shape:  # a choice of groups of experts
            return result
        self.found.append(result[1])
        chosen = self.choose(result[1])
        scores = args[0] if self.unmasked is None else self.unmasked
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and len(self.found) != 1:
            raise RuntimeError(
                f"a router should have chosen {self.shape[1]} experts for each of {self.shape[0]} tokens once, but did "
                f"so {len(self.found)} times: its routes cannot be replayed"
            )

    @property
    def live(self) -> Tensor:
        """The experts that the router would have taken, [t, K]."""
        return self.found[0]
