"""Bugs of quantized weights."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tests.faults.fault import Fault, patch


def _halves_swapped() -> Any:
    from automodel_rl.quantized.nf4 import quantiles_of

    return patch("quantized.nf4.quantiles_of", lambda codes: quantiles_of(codes << 4 | codes >> 4))


def _scales_of_another_row() -> Any:
    from automodel_rl.quantized.nf4 import quantize

    def rolled(values: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantize(values)
        return codes, scales.roll(1, 0)

    return patch("hf.read.quantize", rolled)


def _scales_rounded() -> Any:
    from automodel_rl.quantized.nf4 import quantize

    def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantize(values)
        return codes, scales.to(torch.bfloat16).float()

    return patch("hf.read.quantize", rounded)


def _scaled_twice() -> Any:
    from automodel_rl.quantized.nf4 import dequantize

    return patch("quantized.nf4.dequantize", lambda codes, scales: dequantize(codes, scales * scales))


def _without_offset() -> Any:
    from automodel_rl.hf.bitsandbytes import _nf4_tensor

    return patch("hf.bitsandbytes._nf4_tensor", lambda *of: dataclasses.replace(_nf4_tensor(*of), offset=0.0))


def _backward_by_rows() -> Any:
    from automodel_rl.quantized.linear import quantized_product

    def other(
        tokens: Tensor, codes: Tensor, scales: Tensor, name: str, rounded_to: torch.dtype, transposed: bool
    ) -> Tensor:
        return quantized_product(tokens if transposed else tokens.flip(-1), codes, scales, name, rounded_to, transposed)

    return patch("quantized.linear.quantized_product", other)


def _backward_of_other_experts() -> Any:
    from automodel_rl.quantized.stack import quantized_grouped_product

    def other(inputs: Tensor, codes: Tensor, scale_bytes: Tensor, counts: Tensor, *how: Any) -> Tensor:
        *_, transposed = how
        return quantized_grouped_product(inputs, codes, scale_bytes, counts if transposed else counts.flip(0), *how)

    return patch("quantized.stack.quantized_grouped_product", other)


def _kept_scales_of_another_row() -> Any:
    from automodel_rl.hf.quantized import ScaledTensor

    def rolled(stored: ScaledTensor, opened: Any, box: Any) -> tuple[Tensor, Tensor]:
        codes, scale_bytes = read(stored, opened, box)
        return codes, scale_bytes.roll(1, 0)

    read = ScaledTensor.read_packed
    return patch("hf.quantized.ScaledTensor.read_packed", rolled)


EXPERTS = "distributed/lora/test_nf4_experts.py::test_mixtures_train_as_with_dequantized_weights"
STORED = "distributed/lora/test_stored_base.py::test_training_is_that_on_plain_weights"
TRAINING = "distributed/lora/test_nf4.py::test_training_is_that_of_peft_on_dequantized_weights[sizes0-memory0-lora0]"

FAULTS: dict[str, Fault] = {
    "halves of nf4's bytes swapped": Fault(_halves_swapped, TRAINING),
    "scales of nf4 of another row": Fault(_scales_of_another_row, TRAINING),
    "scales of nf4 rounded to bfloat16": Fault(_scales_rounded, TRAINING),
    "scales of nf4 multiplied twice": Fault(_scaled_twice, TRAINING),
    "backward of a weight in nf4 by other rows": Fault(_backward_by_rows, TRAINING),
    "backward of other experts in nf4": Fault(_backward_of_other_experts, f"{EXPERTS}[qwen3_moe-sizes0-memory0]"),
    "kept scales of fp8 of another row": Fault(_kept_scales_of_another_row, f"{STORED}[fp8-{{}}-{{}}]"),
    "nested offset of nf4 forgotten": Fault(
        _without_offset, "unit/hf/test_bitsandbytes.py::test_values_are_those_of_bitsandbytes"
    ),
}
