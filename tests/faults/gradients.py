"""Bugs of gradients: of their sums over ranks, their norm, and what a step leaves of them."""

from collections.abc import Iterator
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
    def policy(model: Any) -> MixedPrecisionPolicy:
        compute = getattr(torch, model.dtype)
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute, cast_forward_inputs=False)

    return patch("model.parallelise.mixed_precision", policy)


FAILED = "distributed/step/test_failed_steps.py"
PRECISION = "distributed/model/test_precision.py"

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
        lambda: everywhere(lambda part: None, "step.runner.release_gathered", "step.encoder_in_turn.release_gathered"),
        Verified("qwen3"),
    ),
    "partial gradients of tp left alone": Fault(
        lambda: patch("step.runner.sum_partial_gradients", return_value=None), Verified("qwen3", {"tp": 2})
    ),
    "gradients reduced in bfloat16": Fault(
        _reduced_in_compute_dtype, f"{PRECISION}::test_gradients_of_rows_and_ranks_add_up_in_float32"
    ),
    "gradients of a failed step kept": Fault(
        lambda: patch("parallel.sharding.drop_unsharded_gradients", return_value=None),
        f"{FAILED}::test_a_step_that_is_interrupted_anywhere_leaves_no_trace",
    ),
    "FSDP left as it was in a failed step": Fault(
        lambda: patch("parallel.sharding.reset_fsdp", return_value=None),
        f"{FAILED}::test_a_step_that_is_interrupted_anywhere_leaves_no_trace",
    ),
}
