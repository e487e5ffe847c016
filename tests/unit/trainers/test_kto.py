"""The reference point of KTO."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_rl.batch import Batch, TokenSequence
from automodel_rl.trainers.kto import add_reference


class Reads:
    """A policy that notes the lengths of the rows whose log-probabilities are asked for."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def with_weights(self, name: str) -> Any:
        return contextlib.nullcontext()

    def logprobs(self, batch: Batch) -> list[torch.Tensor]:
        self.lengths.append(batch.lengths)
        return [torch.zeros(length) for length in batch.lengths]


def row(prompt: int, completion: int) -> TokenSequence:
    mask = torch.arange(prompt + completion) >= prompt
    return TokenSequence(torch.arange(prompt + completion) + prompt, mask)


@pytest.mark.parametrize("capacity", [80, 100, 400])
@pytest.mark.parametrize(
    ("max_tokens", "context", "longest"), [(70, None, 70), (None, None, 60), (70, 64, 64), (None, 58, 58)]
)
def test_mismatched_rows_are_as_long_whatever_a_microbatch_holds(
    max_tokens: int | None, context: int | None, longest: int, capacity: int
) -> None:
    config: Any = SimpleNamespace(
        loss=SimpleNamespace(reference_point="batch"),
        data=SimpleNamespace(max_tokens=max_tokens),
        batch=SimpleNamespace(capacity=capacity),
    )
    policy: Any = Reads()
    add_reference(policy, Batch([row(55, 5), row(5, 55)]), config, context)
    assert policy.lengths[1] == [longest, 10]
