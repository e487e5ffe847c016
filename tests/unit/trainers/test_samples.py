"""Samples for the report."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from automodel_rl.batch import TokenSequence
from automodel_rl.observe import console
from automodel_rl.trainers.samples import greedy_samples


def test_samples_that_take_long_say_how_many_tokens_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    answers = iter([[5, 6], [7, 0], [0]])
    policy = SimpleNamespace(next_tokens=lambda sequences: next(answers))
    tokenizer = SimpleNamespace(eos_token_id=0, decode=lambda tokens: " ".join(map(str, tokens)))
    prompt = TokenSequence(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.bool))
    said: list[str] = []
    samples = greedy_samples(
        cast(Any, policy), cast(Any, tokenizer), [(prompt, "a"), (prompt, "b")], 9, {0}, said.append
    )
    assert [sample.completion for sample in samples] == ["5 7", "6"]
    assert said == [f"writing 2 samples for the report: {done} of at most 9 tokens" for done in (1, 2, 3)]
