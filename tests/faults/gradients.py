"""Bugs of gradients: of their sums over ranks, their norm, and what a step leaves of them."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.faults.fault import Fault, Verified, everywhere, patch


def _tied_weight_twice_in_the_norm() -> Any:
    from automodel_rl.model.handle import ModelHandle

    def every(handle: Any, module: Any = None) -> Iterator[Any]:
        for part in handle.parts if module is None else module.parts:
            yield from part.named_parameters()

    return mock.patch.object(ModelHandle, "named_parameters", every)


def _norm_of_last_stage() -> Any:
    from automodel_rl.parallel.gradients import local_square_norm

    def norm(parameters: list, layout: Any) -> Tensor:
        return local_square_norm(parameters, layout) * layout.has_last_stage

    return patch("step.runner.local_square_norm", norm)


def _reduced_in_compute_dtype() -> Any:
    def policy(model: Any, least: Any = None) -> MixedPrecisionPolicy:
        compute = getattr(torch, model.dtype)
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute, cast_forward_inputs=False)

    return patch("model.parallelise.mixed_precision", policy)


def _sum_from_before_its_reduction() -> Any:
    """The head adds to the sum that the first microbatch had, which has been reduced since."""
    from automodel_rl.model.part_forward import _gradient_sum

    first: dict[int, Tensor] = {}

    def kept(unit: Any, weight: Tensor) -> Tensor:
        return first.setdefault(id(weight), _gradient_sum(unit, weight))

    return patch("model.part_forward._gradient_sum", kept)


def _before_each_backward(change: Callable[[Any, bool], None]) -> Any:
    from automodel_rl.parallel.sharding import begin_backward

    def changed(part: Any, is_last: bool, **options: bool) -> None:
        begin_backward(part, is_last, **options)
        change(part, is_last)

    return patch("step.drivers.begin_backward", changed)


def _shards_twice() -> Any:
    def double(part: Any, is_last: bool) -> None:
        for parameter in part.parameters():
            if is_last and parameter.grad is not None:
                parameter.grad *= 2

    return _before_each_backward(double)


def _frozen_weights_move() -> Any:
    from automodel_rl.engine import Engine

    step = Engine._optimizer_step

    @torch.no_grad()
    def moving(engine: Engine, *arguments: Any) -> None:
        step(engine, *arguments)
        for _, parameter in engine.handle.named_parameters():
            if not parameter.requires_grad:
                parameter *= 0.9  # a weight decay

    return mock.patch.object(Engine, "_optimizer_step", moving)


FAILED = "distributed/step/test_failed_steps.py"
PRECISION = "distributed/model/test_precision.py"


def _reduced_at_the_end_alone() -> Any:
    """Whole gradients are kept until the last backward, however weights are sharded: numbers are equal, memory is
    not."""
    from automodel_rl.parallel.sharding import begin_backward

    def late(part: Any, is_last: bool, *, reduces: bool, reshards: bool) -> None:
        begin_backward(part, is_last, reduces=False, reshards=reshards)

    return everywhere(late, "step.drivers.begin_backward", "encoder.encoding.begin_backward")


FAULTS: dict[str, Fault] = {
    "tied gradient counted once": Fault(
        lambda: patch("parallel.gradients.TiedEmbedding.sum_gradients", return_value=None),
        Verified("qwen3", {"pp": 2}, tied=True),
    ),
    "tied weight twice in the norm": Fault(_tied_weight_twice_in_the_norm, Verified("qwen3", {"pp": 2}, tied=True)),
    "mean over data ranks": Fault(
        lambda: patch("parallel.sharding.sum_fsdp_gradients", return_value=None),
        Verified("qwen3", {"pp": 2, "dp_shard": 2}),
    ),
    "mean over cp": Fault(
        lambda: patch("parallel.sharding.sum_fsdp_gradients", return_value=None), Verified("qwen3", {"cp": 2})
    ),
    "norm of one stage": Fault(_norm_of_last_stage, Verified("qwen3", {"pp": 2})),
    "gradients are not clipped": Fault(
        lambda: mock.patch("torch.nn.utils.clip_grads_with_norm_", return_value=None), Verified("qwen3")
    ),
    "weights gathered before the optimizer step are used after it": Fault(
        lambda: everywhere(lambda part: None, "step.runner.release_gathered", "encoder.media_encoder.release_gathered"),
        Verified("qwen3"),
    ),
    "partial gradients of tp left alone": Fault(
        lambda: patch("step.runner.sum_partial_gradients", return_value=None), Verified("qwen3", {"tp": 2})
    ),
    "gradients reduced in bfloat16": Fault(
        _reduced_in_compute_dtype, f"{PRECISION}::test_gradients_of_rows_and_ranks_add_up_in_float32"
    ),
    "the head's gradient added to a sum that is reduced": Fault(
        _sum_from_before_its_reduction, Verified("qwen3", {"dp_shard": 2, "fsdp": "reshard"})
    ),
    "sums of earlier microbatches in shards twice": Fault(
        _shards_twice, Verified("qwen3", {"dp_shard": 2, "fsdp": "reshard"})
    ),
    "sums of copies of shards left apart": Fault(
        lambda: _before_each_backward(lambda part, _: part.set_requires_all_reduce(False)),
        Verified("qwen3", {"dp_shard": 2, "dp_replicate": 2, "fsdp": "reshard"}),
    ),
    "frozen weights move": Fault(
        _frozen_weights_move, "distributed/model/test_frozen_weights.py::test_frozen_weights_stay_as_they_are_loaded"
    ),
    "gradients of a failed step kept": Fault(
        lambda: patch("parallel.sharding.drop_unsharded_gradients", return_value=None),
        f"{FAILED}::test_a_step_that_is_interrupted_anywhere_leaves_no_trace",
    ),
    "FSDP left as it was in a failed step": Fault(
        lambda: patch("parallel.sharding.reset_fsdp", return_value=None),
        f"{FAILED}::test_a_step_that_is_interrupted_anywhere_leaves_no_trace",
    ),
    "gradients in shards reduced at the end of a step alone": Fault(
        _reduced_at_the_end_alone,
        "distributed/parallel/test_resharding.py::test_units_are_gathered_no_oftener_than_they_are_needed[reshard]",
    ),
}
