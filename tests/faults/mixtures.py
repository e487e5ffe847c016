"""Bugs of mixtures of experts, and of the replay of their routes."""

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests.faults.fault import Fault, Verified, patch


def _experts_twice() -> Any:
    from automodel_rl.parallel.sharding import sum_fsdp_gradients

    def twice(part: Any) -> None:
        sum_fsdp_gradients(part)
        for name, module in part.named_modules():
            if name.endswith(".experts") and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(0.5)

    return patch("parallel.sharding.sum_fsdp_gradients", twice)


def _no_gradient_from_other_ranks() -> Any:
    from automodel_rl.parallel.collectives import AllToAll

    backward = AllToAll.backward

    def lost(ctx: Any, *gradients: Tensor) -> Any:
        return torch.zeros_like(backward(ctx, *gradients)[0]), None, None, None, None

    return mock.patch.object(AllToAll, "backward", staticmethod(lost))


def _first_sums_only() -> Any:
    from automodel_rl.mixture.expert_exchange import SumRows

    def forward(ctx: Any, tensor: Tensor, source_s: Tensor, place_nJ: Tensor) -> Tensor:
        ctx.save_for_backward(source_s)
        return tensor[place_nJ[:, 0]]

    return mock.patch.object(SumRows, "forward", staticmethod(forward))


def _no_auxiliary_loss() -> Any:
    from automodel_rl.mixture.routers import _AddLoss

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0])

    return mock.patch.object(_AddLoss, "backward", staticmethod(backward))


def _empty_microbatches_load() -> Any:
    from automodel_rl.mixture.routers import _load

    return patch("mixture.routers._load", lambda chosen, is_real, n: _load(chosen, torch.ones_like(is_real), n))


def _routes_shifted() -> Any:
    """Routes are shifted, as if they belonged to the token that is predicted."""
    from automodel_rl.batch import Routes

    take = Routes.take

    def shifted(routes: Routes, places: Tensor, is_token: Tensor) -> Routes:
        return take(dataclasses.replace(routes, experts=routes.experts.roll(-1, 0)), places, is_token)

    return mock.patch.object(Routes, "take", shifted)


def _routes_by_place() -> Any:
    """Layers of a stage are numbered from 0."""
    from automodel_rl.batch import Routes

    def select(routes: Routes, layers: Any) -> Routes:
        return Routes(tuple(layers), routes.experts[:, : len(layers)])

    return mock.patch.object(Routes, "select", select)


def _live_weights_of_routers() -> Any:
    """Tokens go where they are sent, with the weights of the experts that the router would have taken."""
    from automodel_rl.mixture.router_replay import Selection

    inner = Selection.__torch_function__

    def live(selection: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = inner(selection, func, types, args, kwargs)
        if func in (torch.topk, Tensor.topk) and result[1].shape == selection.shape:
            return torch.return_types.topk((args[0].gather(-1, selection.found[-1]), result[1]))
        return result

    return mock.patch.object(Selection, "__torch_function__", live)


def _routes_of_the_first_share() -> Any:
    """Under sequence parallelism all ranks follow the routes of the first one's tokens."""
    from automodel_rl.batch import LocalMicrobatch

    between = LocalMicrobatch.between_blocks

    def first(microbatch: LocalMicrobatch, tp: int, tp_rank: int) -> LocalMicrobatch:
        return dataclasses.replace(between(microbatch, tp, tp_rank), routes=between(microbatch, tp, 0).routes)

    return mock.patch.object(LocalMicrobatch, "between_blocks", first)


def _gate_and_up_swapped() -> Any:
    from automodel_rl.families.file_names import TEXT_FILE_NAMES, ExpertNames, FileNames

    swapped = FileNames(ExpertNames(gate="up_proj", up="gate_proj"))
    return mock.patch.dict(TEXT_FILE_NAMES, qwen3_moe=(swapped,))


def _bias_in_the_weights() -> Any:
    from automodel_rl.mixture.routers import _forward

    def biased(router: Any, *args: Any) -> Any:
        logits, weights, chosen = _forward(router, *args)
        return logits, weights + router.e_score_correction_bias[chosen].to(weights.dtype), chosen

    return patch("mixture.routers._forward", biased)


REPLAY = {"replay": True}
SP = {"tp": 2, "sequence_parallel": True}

FAULTS: dict[str, Fault] = {
    "experts' results in the order of experts": Fault(
        lambda: patch("mixture.experts._places", lambda order, _: torch.arange(len(order))), Verified("qwen3_moe")
    ),
    "sums of other ranks' experts left out": Fault(_first_sums_only, Verified("qwen3_moe", {"dp_shard": 2, "ep": 2})),
    "expert gradients scaled twice": Fault(_experts_twice, Verified("qwen3_moe", {"cp": 2, "ep": 2})),
    "no gradients from experts of other ranks": Fault(
        _no_gradient_from_other_ranks, Verified("qwen3_moe", {"dp_shard": 2, "ep": 2})
    ),
    "auxiliary loss left out": Fault(_no_auxiliary_loss, Verified("qwen3_moe", case={"aux_loss": 0.1})),
    "auxiliary loss by the load of this rank's tokens": Fault(
        lambda: patch("mixture.routers.all_reduce", lambda load, _: load),
        Verified("qwen3_moe", SP, case={"aux_loss": 0.1}),
    ),
    "gate and up of experts swapped": Fault(_gate_and_up_swapped, Verified("qwen3_moe")),
    "a router's bias in the weights": Fault(_bias_in_the_weights, Verified("deepseek_v3")),
    "routes of another tp rank's tokens": Fault(_routes_of_the_first_share, Verified("qwen3_moe", SP, case=REPLAY)),
    "empty microbatches count as load of experts": Fault(
        _empty_microbatches_load,
        "distributed/mixture/test_routers.py::test_load_and_auxiliary_loss_are_those_of_the_formula",
    ),
    "routes shifted by a token": Fault(_routes_shifted, Verified("qwen3_moe", case=REPLAY)),
    "routes of other layers": Fault(_routes_by_place, Verified("qwen3_moe", {"pp": 2}, case=REPLAY)),
    "replayed tokens with the weights of other experts": Fault(
        _live_weights_of_routers, Verified("qwen3_moe", case=REPLAY)
    ),
}
