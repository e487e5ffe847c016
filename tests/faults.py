"""Known bugs that are put into the package, one at a time, to see that `verify` or a test notices each.

python -m tests.faults [--only PART_OF_A_NAME]
"""

import argparse
import contextlib
import copy
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from automodel_rl.batch import LocalMicrobatch, Microbatch, local_microbatch
from automodel_rl.config import MuonConfig

PLANTED = "AUTOMODEL_RL_PLANTED_FAULT"
"""Environment variable with the fault that tests and their ranks run with."""


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Puts a known bug into the package for the length of a block."""
    with contextlib.nullcontext() if not fault else FAULTS[fault].plant():
        yield


@dataclass(frozen=True)
class Verified:
    """A layout that `verify` says is different once the fault is there.

    Attributes:
        family: of the tiny model.
        sizes: of the layout.
        tied: whether embedding and head share their weight.
        components: in place of `sizes`, for a vision-language model.
        case: further fields of the comparison's `Case`.
    """

    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    components: dict[str, Any] | None = None
    case: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """One planted bug, and what notices it.

    Attributes:
        plant: makes the context in which it is there.
        caught_by: a layout, or the name of a test, below `tests/`.
    """

    plant: Callable[[], AbstractContextManager[Any]]
    caught_by: Verified | str


def one_document(microbatch: Microbatch, *place: int) -> LocalMicrobatch:
    """A microbatch without its cu_seqlens: the documents see each other."""
    return local_microbatch(dataclasses.replace(microbatch, lengths=(microbatch.num_tokens,)), *place)


def _patch(target: str, replacement: Any = None, **options: Any) -> Any:
    options = options or {"new": replacement}
    return mock.patch(f"automodel_rl.{target}", **options)


def _norm_of_last_stage() -> Any:
    from automodel_rl.parallel.gradients import local_square_norm

    def norm(parameters: list, layout: Any) -> Tensor:
        return local_square_norm(parameters, layout) * layout.has_last_stage

    return _patch("step.runner.local_square_norm", norm)


def _local_counts() -> Any:
    from automodel_rl.losses import count
    from automodel_rl.step.agreement import GlobalBatch, agree_on_batch

    def agree(microbatches: list, *rest: Any) -> GlobalBatch:
        return dataclasses.replace(agree_on_batch(microbatches, *rest), counts=count(microbatches))

    return _patch("step.runner.agree_on_batch", agree)


def _experts_twice() -> Any:
    from automodel_rl.parallel.sharding import sum_fsdp_gradients

    def twice(part: Any) -> None:
        sum_fsdp_gradients(part)
        for name, module in part.named_modules():
            if name.endswith(".experts") and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(0.5)

    return _patch("parallel.sharding.sum_fsdp_gradients", twice)


def _swap_of_one_part() -> Any:
    from automodel_rl.engine.reference_weights import ReferenceWeights

    class OnePart(ReferenceWeights):
        def __init__(self, handle: Any):
            first = copy.copy(handle)
            first.parts = handle.parts[:1]
            super().__init__(first)

    return _patch("tools.verify.comparison.ReferenceWeights", OnePart)


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


def _mean_over_two(where: str) -> Any:
    """Gradients of one component are averaged by FSDP."""
    from automodel_rl.parallel.sharding import wrap_fsdp

    def averaging(part: Any, *args: Any) -> None:
        wrap_fsdp(part, *args)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)

    return _patch(f"{where}.wrap_fsdp", averaging)


def _clip_by_component() -> Any:
    """Each mesh clips its gradients by their own norm."""

    def clip(parameters: list, most: float, _: Tensor) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, most)

    return mock.patch("torch.nn.utils.clip_grads_with_norm_", clip)


def _embeddings_off_by_one() -> Any:
    from automodel_rl.batch import ImageTokens

    put_into = ImageTokens.put_into

    def off(tokens: ImageTokens, hidden: Tensor) -> Tensor:
        assert tokens.embeddings is not None
        return put_into(dataclasses.replace(tokens, embeddings=tokens.embeddings.roll(1, 0)), hidden)

    return mock.patch.object(ImageTokens, "put_into", off)


def _buffers_by_shape() -> Any:
    """Messages of microbatches of equal shape share a buffer."""
    from automodel_rl.compat.pipelining import PackedStage

    bind, receive = PackedStage.bind, PackedStage._receive
    buffers: dict[Any, Any] = {}

    def anew(stage: PackedStage, *args: Any) -> None:
        buffers.clear()
        bind(stage, *args)

    def shared(stage: PackedStage, name: str, source: int, shape: Any, *args: Any) -> Any:
        key = stage.stage_index, name, tuple(shape)
        if key not in buffers:
            buffers[key] = receive(stage, name, source, shape, *args)
        return buffers[key]

    return mock.patch.multiple(PackedStage, bind=anew, _receive=shared)


def _no_master_weights() -> Any:
    def compute_alone(model: Any) -> tuple[torch.dtype, torch.dtype]:
        return (getattr(torch, model.dtype),) * 2

    return _everywhere(compute_alone, "model.handle.dtypes_of", "model.parallelise.dtypes_of")


def _reduced_in_compute_dtype() -> Any:
    def policy(model: Any) -> MixedPrecisionPolicy:
        compute = getattr(torch, model.dtype)
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute, cast_forward_inputs=False)

    return _patch("model.parallelise.mixed_precision", policy)


def _setting_ignored(**settings: Any) -> Any:
    """The optimizer is made without regard to what the config says of something."""
    from automodel_rl.optimizers import ModelOptimizer

    def make(parts: Any, description: Any, config: Any) -> Any:
        return ModelOptimizer(parts, description, config.model_copy(update=settings))

    return _patch("engine.engine.ModelOptimizer", make)


def _schedule_ignored(**settings: Any) -> Any:
    from automodel_rl.optimizers import learning_rate

    def rate(config: Any, *place: Any) -> float:
        return learning_rate(config.model_copy(update=settings), *place)

    return _everywhere(rate, "engine.engine.learning_rate", "tools.verify.comparison.learning_rate")


@contextlib.contextmanager
def _everywhere(replacement: Any, *targets: str) -> Iterator[None]:
    """Replaces a function in all places that have imported it by name."""
    with contextlib.ExitStack() as stack:
        for target in targets:
            stack.enter_context(_patch(target, replacement))
        yield


def _decay_of_everything() -> Any:
    from automodel_rl.optimizers import ModelOptimizer

    def make(parts: Any, description: Any, config: Any) -> Any:
        optimizer = ModelOptimizer(parts, description, config)
        for group in optimizer.groups:
            group["weight_decay"] = config.weight_decay
        return optimizer

    return _patch("engine.engine.ModelOptimizer", make)


def _muon_of_shards() -> Any:
    """Every rank orthogonalises its own shard."""

    def of_shards(work: Any, shard_of: Any, parameters: Any, _: Any) -> Any:
        return [(parameter, work(shard_of(parameter))) for parameter in parameters]

    return _patch("optimizers.muon.on_whole_matrices", of_shards)


def _muon_of_a_stack() -> Any:
    """All experts of a stack are one matrix."""
    from automodel_rl.optimizers.muon import orthogonal

    def of_one(matrix: Tensor, num_steps: int) -> Tensor:
        return orthogonal(matrix.flatten(0, -2), num_steps).view_as(matrix)

    return _patch("optimizers.muon.orthogonal", of_one)


def _first_chunk_again() -> Any:
    from automodel_rl.model.logprobs import _chunks

    def chunks(num_tokens: int) -> list[slice]:
        found = _chunks(num_tokens)
        return [found[0], *found[:-2], found[-1]] if len(found) > 2 else found

    return _patch("model.logprobs._chunks", chunks)


def _first_block_again() -> Any:
    from automodel_rl.step.runner import StepRunner

    forward, block = StepRunner.forward, StepRunner._forward_block
    first: list[list[Tensor]] = []

    def anew(runner: Any, *args: Any) -> list[Tensor]:
        first.clear()
        return forward(runner, *args)

    def again(runner: Any, *args: Any) -> list[Tensor]:
        first.append(block(runner, *args))
        pairs = zip(first[-1], first[0], strict=False)
        return [old if old.shape == own.shape else own for own, old in pairs] + first[-1][len(first[0]) :]

    return mock.patch.multiple(StepRunner, forward=anew, _forward_block=again)


def _second_bucket_empty() -> Any:
    from automodel_rl.hf.buckets import StageBuckets

    pack = StageBuckets.pack

    def first_alone(buckets: Any, number: int, targets: list[Tensor]) -> None:
        pack(buckets, number, targets)
        if number == 1:
            torch._foreach_zero_(targets)

    return mock.patch.object(StageBuckets, "pack", first_alone)


def _no_auxiliary_loss() -> Any:
    from automodel_rl.mixture.routers import _AddLoss

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0])

    return mock.patch.object(_AddLoss, "backward", staticmethod(backward))


def _evaluation_of_fewer_microbatches() -> Any:
    from automodel_rl.engine import Engine

    evaluate = Engine.evaluate
    return mock.patch.object(
        Engine, "evaluate", lambda engine, microbatches, *rest: evaluate(engine, microbatches[:-1], *rest)
    )


def _empty_microbatches_count() -> Any:
    from automodel_rl.batch import empty_microbatch

    def counting(like: Any = None) -> Microbatch:
        microbatch = empty_microbatch(like)
        return dataclasses.replace(microbatch, loss_mask=microbatch.targets >= 0)

    return _everywhere(counting, "tools.verify.comparison.empty_microbatch", "step.runner.empty_microbatch")


def _rank_by_rank(where: str) -> Any:
    """Items that were dealt out to ranks in turn are joined rank by rank."""
    return _patch(where, lambda shares: [item for share in shares for item in share])


def _positions_go_on() -> Any:
    def going_on(microbatch: Microbatch, *place: Any) -> LocalMicrobatch:
        made = local_microbatch(microbatch, *place)
        return dataclasses.replace(made, position_ids=torch.arange(made.num_tokens))

    return _patch("step.local_microbatches.local_microbatch", going_on)


def _window_too_wide() -> Any:
    from automodel_rl.model.attention import _mask

    def wider(num_queries: int, num_keys: int, window: int | None, device: Any) -> Tensor:
        return _mask(num_queries, num_keys, None if window is None else window + 1, device)

    return _patch("model.attention._mask", wider)


def _without(name: str) -> Any:
    """Attention leaves out one of its parameters."""
    from automodel_rl.model.attention import BACKENDS, eager

    def leaving_out(q: Tensor, k: Tensor, v: Tensor, call: Any, parameters: Any) -> Tensor:
        return eager(q, k, v, call, dataclasses.replace(parameters, **{name: None}))

    return mock.patch.dict(BACKENDS, {"eager": leaving_out})


def _tokens_restored_wrongly() -> Any:
    def turned(microbatch: Microbatch, *place: Any) -> LocalMicrobatch:
        made = local_microbatch(microbatch, *place)
        return made if made.restore is None else dataclasses.replace(made, restore=made.restore.roll(1))

    return _patch("step.local_microbatches.local_microbatch", turned)


def _keys_of_own_rank() -> Any:
    """Gradients of gathered keys and values are cut, not summed."""
    from automodel_rl.parallel.collectives import AllGatherCP, _own_rows

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(gradients[0], ctx.group), None, None

    return mock.patch.object(AllGatherCP, "backward", staticmethod(backward))


def _vocabulary_of_own_rank() -> Any:
    from automodel_rl.model.logprobs import _over_vocabulary

    def own(picked: Tensor, logsumexp: Tensor, mean: Any, group: Any) -> Any:
        total, _, mean = _over_vocabulary(picked, logsumexp, mean, group)
        return total, logsumexp, mean

    return _patch("model.logprobs._over_vocabulary", own)


def _no_gradient_from_other_ranks() -> Any:
    from automodel_rl.parallel.collectives import AllToAll

    backward = AllToAll.backward

    def lost(ctx: Any, *gradients: Tensor) -> Any:
        return torch.zeros_like(backward(ctx, *gradients)[0]), None, None, None

    return mock.patch.object(AllToAll, "backward", staticmethod(lost))


def _pairs_turned() -> Any:
    from automodel_rl.losses.dpo import _by_pair

    return _patch("losses.dpo._by_pair", lambda values, microbatch: _by_pair(values, microbatch).flip(1))


def _deviation_of_population() -> Any:
    std = Tensor.std
    return mock.patch.object(Tensor, "std", lambda tensor, *args, correction=0: std(tensor, *args, correction=0))


def _temperature_ignored() -> Any:
    from automodel_rl.engine import Engine

    add = Engine.add_logprobs
    return mock.patch.object(
        Engine, "add_logprobs", lambda engine, microbatches, name, temperature=1.0: add(engine, microbatches, name)
    )


def _merged_without_scale() -> Any:
    from automodel_rl.lora.layers import merge

    def unscaled(linear: Any, down: Tensor) -> Tensor:
        return merge(linear, down / linear.lora_scale)

    return _patch("hf.sources.merge", unscaled)


def _tied_weight_twice_in_the_norm() -> Any:
    from automodel_rl.model.handle import ModelHandle

    def every(handle: Any, module: Any = None) -> Iterator[Any]:
        for part in handle.parts if module is None else module.parts:
            yield from part.named_parameters()

    return mock.patch.object(ModelHandle, "named_parameters", every)


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


def _empty_microbatches_load() -> Any:
    from automodel_rl.mixture.routers import _load

    return _patch("mixture.routers._load", lambda chosen, is_real, n: _load(chosen, torch.ones_like(is_real), n))


INTERLEAVED = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
ENCODERS = {"vision": {"ranks": "0-1", "dp_shard": 2}, "language": {"ranks": 2}}
READERS = {"vision": {"ranks": 0}, "language": {"ranks": "1-2", "dp_shard": 2}}
REPLAY = {"replay": True}
WITH_MUON = {"optimizer": "muon"}
FAILED = "distributed/step/test_failed_steps.py"
LOSSES = "unit/losses/test_losses.py"
GRPO = "distributed/trainers/test_grpo.py"
PRECISION = "distributed/model/test_precision.py"

FAULTS: dict[str, Fault] = {
    "documents see each other": Fault(
        lambda: _patch("step.local_microbatches.local_microbatch", one_document), Verified("qwen3")
    ),
    "positions go on across sequences": Fault(_positions_go_on, Verified("qwen3")),
    "loss mask and values left on their tokens": Fault(
        lambda: _patch("batch.microbatch._to_predictor", lambda values: values), Verified("qwen3")
    ),
    "empty microbatches count": Fault(_empty_microbatches_count, Verified("qwen3", {"pp": 2})),
    "rotary embeddings by the longest sequence": Fault(
        lambda: _patch("support.model_rules.BY_LENGTH", ()),
        "unit/support/test_description.py::test_rotary_embeddings_that_depend_on_the_length_of_a_sequence_are_refused",
    ),
    "a window one key too wide": Fault(_window_too_wide, Verified("mistral")),
    "soft cap left out": Fault(lambda: _without("softcap"), Verified("gemma2")),
    "sinks left out": Fault(lambda: _without("sinks"), Verified("gpt_oss")),
    "chunks of the head after the first are the first": Fault(_first_chunk_again, Verified("qwen3")),
    "blocks of microbatches after the first are the first": Fault(_first_block_again, Verified("qwen3")),
    "second bucket of an export is empty": Fault(_second_bucket_empty, Verified("qwen3")),
    "tied gradient counted once": Fault(
        lambda: _patch("parallel.gradients.TiedEmbedding.sum_gradients", return_value=None),
        Verified("qwen3", {"pp": 2}, tied=True),
    ),
    "tied weight twice in the norm": Fault(_tied_weight_twice_in_the_norm, Verified("qwen3", {"pp": 2}, tied=True)),
    "mean over data ranks": Fault(
        lambda: _patch("parallel.sharding.sum_fsdp_gradients", return_value=None),
        Verified("qwen3", {"pp": 2, "dp_shard": 2}),
    ),
    "mean over cp": Fault(
        lambda: _patch("parallel.sharding.sum_fsdp_gradients", return_value=None), Verified("qwen3", {"cp": 2})
    ),
    "local token counts": Fault(_local_counts, Verified("qwen3", {"pp": 2, "dp_shard": 2})),
    "evaluation leaves out the last microbatch": Fault(_evaluation_of_fewer_microbatches, Verified("qwen3")),
    "norm of one stage": Fault(_norm_of_last_stage, Verified("qwen3", {"pp": 2})),
    "gradients are not clipped": Fault(
        lambda: mock.patch("torch.nn.utils.clip_grads_with_norm_", return_value=None), Verified("qwen3")
    ),
    "weights gathered before the optimizer step are used after it": Fault(
        lambda: _everywhere(lambda part: None, "step.runner.release_gathered", "step.image_encoder.release_gathered"),
        Verified("qwen3"),
    ),
    "receive buffers shared by equal shapes (interleaved)": Fault(_buffers_by_shape, Verified("qwen3", INTERLEAVED)),
    "receive buffers shared by equal shapes (zero bubble)": Fault(
        _buffers_by_shape,
        Verified("qwen3", {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}, case={"microbatches": (3, 9)}),
    ),
    "experts' results in the order of experts": Fault(
        lambda: _patch("mixture.experts._inverse", lambda order: order), Verified("qwen3_moe")
    ),
    "expert gradients scaled twice": Fault(_experts_twice, Verified("qwen3_moe", {"cp": 2, "ep": 2})),
    "no gradients from experts of other ranks": Fault(
        _no_gradient_from_other_ranks, Verified("qwen3_moe", {"dp_shard": 2, "ep": 2})
    ),
    "auxiliary loss left out": Fault(_no_auxiliary_loss, Verified("qwen3_moe", case={"aux_loss": 0.1})),
    "empty microbatches count as load of experts": Fault(
        _empty_microbatches_load,
        "distributed/mixture/test_routers.py::test_load_and_auxiliary_loss_are_those_of_the_formula",
    ),
    "routes shifted by a token": Fault(_routes_shifted, Verified("qwen3_moe", case=REPLAY)),
    "routes of other layers": Fault(_routes_by_place, Verified("qwen3_moe", {"pp": 2}, case=REPLAY)),
    "replayed tokens with the weights of other experts": Fault(
        _live_weights_of_routers, Verified("qwen3_moe", case=REPLAY)
    ),
    "reference swap of one part": Fault(_swap_of_one_part, Verified("qwen3", INTERLEAVED)),
    "cp tokens restored in another order": Fault(_tokens_restored_wrongly, Verified("qwen3", {"cp": 2})),
    "gradients of keys of this cp rank alone": Fault(_keys_of_own_rank, Verified("qwen3", {"cp": 2})),
    "softmax over this tp rank's vocabulary": Fault(_vocabulary_of_own_rank, Verified("qwen3", {"tp": 2})),
    "partial gradients of tp left alone": Fault(
        lambda: _patch("step.runner.sum_partial_gradients", return_value=None), Verified("qwen3", {"tp": 2})
    ),
    "mean over encoder ranks": Fault(lambda: _mean_over_two("model.vision"), Verified("llava", components=ENCODERS)),
    "mean over ranks of the language model": Fault(
        lambda: _mean_over_two("model.parallelise"), Verified("llava", components=READERS)
    ),
    "clipping by module": Fault(_clip_by_component, Verified("llava", components=READERS)),
    "embeddings off by one": Fault(_embeddings_off_by_one, Verified("llava", components=READERS)),
    "eps hard-coded": Fault(lambda: _setting_ignored(eps=1e-8), Verified("qwen3")),
    "betas hard-coded": Fault(lambda: _setting_ignored(betas=(0.9, 0.95)), Verified("qwen3")),
    "weight decay left out": Fault(lambda: _setting_ignored(weight_decay=0.0), Verified("qwen3")),
    "weight decay of norms": Fault(_decay_of_everything, Verified("qwen3")),
    "Muon orthogonalises shards of dp": Fault(_muon_of_shards, Verified("qwen3", {"dp_shard": 2}, case=WITH_MUON)),
    "Muon orthogonalises shards of tp": Fault(_muon_of_shards, Verified("qwen3", {"tp": 2}, case=WITH_MUON)),
    "Muon takes a stack of experts for one matrix": Fault(_muon_of_a_stack, Verified("qwen3_moe", case=WITH_MUON)),
    "Muon's settings hard-coded": Fault(
        lambda: _setting_ignored(muon=MuonConfig()),
        Verified("qwen3", case={**WITH_MUON, "muon": MuonConfig(momentum=0.8)}),
    ),
    "warm-up ignored": Fault(lambda: _schedule_ignored(warmup_steps=0), Verified("qwen3")),
    "decay of the learning rate ignored": Fault(lambda: _schedule_ignored(decay="constant"), Verified("qwen3")),
    "master weights in bfloat16": Fault(
        _no_master_weights, f"{PRECISION}::test_updates_that_bfloat16_would_lose_are_kept_in_float32"
    ),
    "gradients reduced in bfloat16": Fault(
        _reduced_in_compute_dtype, f"{PRECISION}::test_gradients_of_rows_and_ranks_add_up_in_float32"
    ),
    "examples rank by rank": Fault(
        lambda: _rank_by_rank("data.loader.interleave"),
        "distributed/data/test_loader.py::test_a_global_batch_has_the_same_order_on_any_number_of_ranks",
    ),
    "place in the data forgotten": Fault(
        lambda: _patch("data.loader.PackedLoader.load_state_dict", return_value=None),
        "distributed/data/test_loader.py::test_data_ranks_share_global_batches_and_resume_between_steps",
    ),
    "reference of adapters never in place": Fault(
        lambda: _patch("engine.reference_weights.without_adapters", lambda parts: contextlib.nullcontext()),
        f"{GRPO}::test_adapters_are_trained_against_the_model_without_them",
    ),
    "rewards of another rank's completions": Fault(
        lambda: _rank_by_rank("rollout.collect.interleave"),
        f"{GRPO}::test_sequences_are_trained_with_the_advantages_of_their_rewards",
    ),
    "old log-probabilities at temperature 1": Fault(
        _temperature_ignored, f"{GRPO}::test_sequences_are_trained_with_the_advantages_of_their_rewards[temperature]"
    ),
    "adapters merged without their scale": Fault(
        _merged_without_scale, f"{GRPO}::test_adapters_are_trained_against_the_model_without_them"
    ),
    "moments of a checkpoint dropped": Fault(
        lambda: _patch("checkpoint.state._restore_state", return_value=None),
        "distributed/checkpoint/test_state.py::test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit",
    ),
    "gradients of a failed step kept": Fault(
        lambda: _patch("parallel.sharding.drop_unsharded_gradients", return_value=None),
        f"{FAILED}::test_a_step_that_is_interrupted_anywhere_leaves_no_trace",
    ),
    "FSDP left as it was in a failed step": Fault(
        lambda: _patch("parallel.sharding.reset_fsdp", return_value=None),
        f"{FAILED}::test_a_step_that_is_interrupted_anywhere_leaves_no_trace",
    ),
    "token ids not looked at": Fault(
        lambda: _patch("step.agreement._problem", return_value=""),
        f"{FAILED}::test_token_ids_outside_the_vocabulary_are_refused_on_every_rank",
    ),
    "numbers of microbatches not compared": Fault(
        lambda: _patch("step.agreement._agreed_microbatches", lambda of_ranks: int(of_ranks["num_microbatches"].max())),
        f"{FAILED}::test_rows_that_do_not_fit_each_other_are_refused_on_every_rank",
    ),
    "a step without a trained token": Fault(
        lambda: mock.patch("automodel_rl.engine.engine.math.sqrt", lambda square: square**0.5 + 1e-30),
        f"{FAILED}::test_a_batch_without_a_trained_token_changes_no_weight_and_says_so",
    ),
    "k3 that cancels": Fault(
        lambda: mock.patch("torch.expm1", lambda r: r.exp() - 1),
        f"{LOSSES}::test_k3_is_exact_where_policy_and_reference_are_close",
    ),
    "pairs of any neighbours": Fault(
        lambda: _patch("losses.dpo._check_pairs", return_value=None),
        f"{LOSSES}::test_rows_whose_neighbours_are_no_pairs_are_refused",
    ),
    "chosen and rejected turned": Fault(_pairs_turned, f"{LOSSES}::test_dpo_equals_the_padded_formula"),
    "standard deviation of the population": Fault(
        _deviation_of_population, f"{LOSSES}::test_advantages_equal_their_formulas"
    ),
}


def different_kinds(caught_by: Verified, fault: str | None, folder: Path) -> list[str]:
    """What `verify` says is different, with a fault or without one; on a rank."""
    from automodel_rl.config import ParallelConfig
    from automodel_rl.config.components import ComponentsConfig
    from automodel_rl.support.families import FAMILIES
    from automodel_rl.tools.verify.command import FLOAT32, FLOAT64, judge
    from automodel_rl.tools.verify.comparison import Case, compare

    in_fp32 = caught_by.components is None and FAMILIES[caught_by.family].computes_in_fp32
    components = None if caught_by.components is None else ComponentsConfig.model_validate(caught_by.components)
    case = Case(ParallelConfig(**caught_by.sizes), components=components, **caught_by.case)
    with planted(fault):
        found = compare(case, folder, folder)
    return [row.kind for row in judge(found, FLOAT32 if in_fp32 else FLOAT64) if not row.is_equal]


def save_model(caught_by: Verified, folder: Path) -> None:
    from tests.tiny import save_tiny_model, save_tiny_vision_model

    if caught_by.components is not None:
        save_tiny_vision_model(folder, num_layers=2)
    else:
        save_tiny_model(folder, caught_by.family, tied=caught_by.tied)


def num_ranks(caught_by: Verified) -> int:
    from automodel_rl.config import ParallelConfig

    return 3 if caught_by.components is not None else ParallelConfig(**caught_by.sizes).world_size


def _noticed_by_test(name: str, test: str) -> str:
    """The test, if it fails with the fault; empty if it passes."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", f"tests/{test}"]
    done = subprocess.run(command, env={**os.environ, PLANTED: name}, capture_output=True, text=True, check=False)
    # pytest's codes of tests that pass and that fail; a crash is noticed, too. A test that could not begin is an error,
    # and has found nothing.
    if done.returncode > 1 or "\nERROR " in done.stdout:
        raise RuntimeError(f"{test} does not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return test if done.returncode else ""


def _noticed_by_verify(name: str, layout: Verified, pool: Any) -> str:
    """What `verify` says is different with the fault; empty if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(layout, Path(folder))
        ranks = pool(num_ranks(layout))
        sound = ranks.run(different_kinds, layout, None, Path(folder))[0]
        if sound:
            raise RuntimeError(f"{layout} is different without a fault, in {sound}")
        try:
            kinds = ranks.run(different_kinds, layout, name, Path(folder))[0]
        except AssertionError as failure:  # a rank raised: that is noticed, too
            return f"verify, which fails: {str(failure).splitlines()[0][:100]}"
    return f"verify, in {kinds[0]}" + (f" and {len(kinds) - 1} more" if kinds[1:] else "") if kinds else ""


def main() -> None:
    from tests.rank_pool import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a fault's name")
    only = parser.parse_args().only
    pool, started, missed = RankPool(), time.monotonic(), []
    chosen = [name for name in FAULTS if only in name]
    for number, name in enumerate(chosen, start=1):
        with planted(name):  # what it changes must be there: else it would be taken for noticed
            pass
        by = FAULTS[name].caught_by
        noticed = _noticed_by_test(name, by) if isinstance(by, str) else _noticed_by_verify(name, by, pool)
        missed += [] if noticed else [name]
        seconds = time.monotonic() - started
        print(f"{number}/{len(chosen)} {seconds:.0f} s {name}: {noticed or 'NOT NOTICED'}", flush=True)
    pool.stop()
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults noticed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    from tests import faults

    faults.main()  # ranks import what they are given by the name of its module
