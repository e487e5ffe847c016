"""Bugs of weights that are exported, merged or exchanged, and of the state of a checkpoint."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.faults.fault import Fault, Verified, patch


def _second_bucket_empty() -> Any:
    from automodel_rl.hf.buckets import StageBuckets

    pack = StageBuckets.pack

    def first_alone(buckets: Any, number: int, targets: list[Tensor]) -> None:
        pack(buckets, number, targets)
        if number == 1:
            torch._foreach_zero_(targets)

    return mock.patch.object(StageBuckets, "pack", first_alone)


def _merged_without_scale() -> Any:
    from automodel_rl.lora.layers import merge

    def unscaled(linear: Any, down: Tensor) -> Tensor:
        return merge(linear, down / linear.lora_scale)

    return patch("hf.sources.merge", unscaled)


def _merged_into_neighbours() -> Any:
    from automodel_rl.lora.layers import merged

    def shifted(weight: Tensor, down: Tensor, up: Tensor, *how: Any) -> Tensor:
        return merged(weight, down.roll(1, 0), up.roll(1, 0), *how)

    return patch("lora.experts.merged", shifted)


def _merged_without_lengths() -> Any:
    from automodel_rl.lora.layers import merged

    def plain(*of_weight: Any, lengths: Any = None) -> Tensor:
        return merged(*of_weight)

    return patch("lora.layers.merged", plain)


def _lengths_of_the_base() -> Any:
    from automodel_rl.lora.magnitude import row_lengths

    def of_base(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        return row_lengths(weight, down, torch.zeros_like(up), scale)

    return patch("lora.magnitude.row_lengths", of_base)


def _experts_fastest_in_a() -> Any:
    from automodel_rl.lora.stacks import to_peft

    def other(tensors: Any) -> dict[str, Tensor]:
        return to_peft({n: t.transpose(0, 1).reshape(t.shape) if ".lora_A." in n else t for n, t in tensors.items()})

    return patch("lora.peft.to_peft", other)


GRPO, LORA = "distributed/trainers/test_grpo.py", "distributed/lora/test_lora.py"

FAULTS: dict[str, Fault] = {
    "second bucket of an export is empty": Fault(_second_bucket_empty, Verified("qwen3")),
    "reference of adapters never in place": Fault(
        lambda: patch("engine.reference_weights.ReferenceWeights._swap", lambda self: None),
        f"{GRPO}::test_adapters_are_trained_against_the_model_without_them",
    ),
    "adapters merged without their scale": Fault(
        _merged_without_scale, f"{GRPO}::test_adapters_are_trained_against_the_model_without_them"
    ),
    "adapters of experts merged into their neighbours": Fault(
        _merged_into_neighbours,
        f"{LORA}::test_adapters_are_merged_on_every_rank_as_in_files[qwen3_moe-sizes0-targets0]",
    ),
    "adapters merged without the lengths of their rows": Fault(
        _merged_without_lengths, f"{LORA}::test_adapters_are_merged_on_every_rank_as_in_files[llama-sizes4-targets4]"
    ),
    "lengths of rows without their adapters": Fault(
        _lengths_of_the_base, f"{LORA}::test_training_and_files_are_those_of_peft[qwen3-model5-sizes5-adamw-lora5]"
    ),
    "adapters of experts in files by another order": Fault(
        _experts_fastest_in_a, f"{LORA}::test_training_and_files_are_those_of_peft"
    ),
    "moments of a checkpoint dropped": Fault(
        lambda: patch("checkpoint.state._restore_state", return_value=None),
        "distributed/checkpoint/test_state.py::test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit",
    ),
}
