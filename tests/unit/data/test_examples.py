"""Examples that are too long for a microbatch or for the model."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from automodel_rl.batch import TokenSequence
from automodel_rl.config import SourceConfig
from automodel_rl.config.data import CommonBatchConfig, ExamplesConfig
from automodel_rl.data import examples
from automodel_rl.data.examples import ChatDataset, Example, LabelledDataset, PairDataset
from automodel_rl.data.messages import Chat

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A token for every letter of the last message; all of them are trained."""

    def __call__(self, chat: Chat, where: str) -> TokenSequence:
        ids = torch.tensor([LETTERS.index(letter) for letter in chat.messages[-1]["content"]])
        return TokenSequence(ids, torch.ones(len(ids), dtype=torch.bool))


def lengths_of(example: Example) -> list[int]:
    return [len(sequence) for sequence in example.sequences]


def source(tmp_path: Path, record: dict) -> tuple[SourceConfig, ...]:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return (SourceConfig(path=str(path)),)


def batch(microbatch_tokens: int) -> CommonBatchConfig:
    return CommonBatchConfig(microbatch_tokens=microbatch_tokens)


def limits(**values: object) -> ExamplesConfig:
    return ExamplesConfig.model_validate({"train": "none.jsonl", **values})


@pytest.mark.parametrize(
    ("microbatch_tokens", "context", "expected", "truncated"),
    [(26, None, [26], False), (20, None, [20], True), (26, 9, [9], True), (20, 40, [20], True)],
)
def test_a_chat_is_cut_to_the_row_and_to_the_context(
    tmp_path: Path, microbatch_tokens: int, context: int | None, expected: list[int], truncated: bool
) -> None:
    sources = source(tmp_path, {"messages": [{"role": "assistant", "content": LETTERS}]})
    example = ChatDataset(sources, Letters(), batch(microbatch_tokens), context, limits())[(0, 0)]
    assert (lengths_of(example), example.is_truncated) == (expected, truncated)
    dropped = ChatDataset(sources, Letters(), batch(microbatch_tokens), context, limits(overlong="drop"))[(0, 0)]
    assert lengths_of(dropped) == ([] if truncated else expected)


@pytest.mark.parametrize(
    ("microbatch_tokens", "context", "expected"),
    [(36, None, [26, 10]), (30, None, [20, 10]), (12, None, [6, 6]), (36, 8, [8, 8]), (36, 20, [20, 10])],
)
def test_of_a_pair_the_longer_one_is_cut_first(
    tmp_path: Path, microbatch_tokens: int, context: int | None, expected: list[int]
) -> None:
    sources = source(tmp_path, {"prompt": "a", "chosen": LETTERS, "rejected": LETTERS[:10]})
    example = PairDataset(sources, Letters(), batch(microbatch_tokens), context, limits())[(0, 0)]
    assert lengths_of(example) == expected


def test_a_completion_that_is_cut_keeps_its_label(tmp_path: Path) -> None:
    sources = source(tmp_path, {"prompt": "a", "completion": LETTERS, "label": True})
    (cut,) = LabelledDataset(sources, Letters(), batch(20), None, limits())[(0, 0)].sequences
    assert cut.values["label"].tolist() == [1.0] * 20


def test_examples_of_the_next_epoch_come_from_memory_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, sources = ("abc", "defgh"), []
    for number, text in enumerate(texts):
        (tmp_path / str(number)).mkdir()
        sources += source(tmp_path / str(number), {"messages": [{"role": "assistant", "content": text}]})
    letters = mock.Mock(side_effect=Letters())
    monkeypatch.setattr(examples, "MAX_KEPT_TOKENS", 2 * examples.EXAMPLE_TOKENS)  # for one, with its tokens
    dataset = ChatDataset(sources, letters, batch(20), None, limits())
    for _ in range(3):
        assert [lengths_of(dataset[(number, 0)]) for number in (0, 1)] == [[3], [5]]
    assert letters.call_count == 1 + 3
    monkeypatch.setattr(examples, "get_worker_info", lambda: "a worker")
    of_worker = ChatDataset(sources, letters, batch(20), None, limits())
    for _ in range(2):
        of_worker[(0, 0)]
    assert letters.call_count == 4 + 2, "what a worker sends must not live on in it"


@pytest.mark.parametrize(("most", "expected"), [(30, 20), (20, 20), (7, 7)])
def test_max_tokens_is_a_limit_of_its_own(tmp_path: Path, most: int, expected: int) -> None:
    sources = source(tmp_path, {"messages": [{"role": "assistant", "content": LETTERS}]})
    assert lengths_of(ChatDataset(sources, Letters(), batch(20), None, limits(max_tokens=most))[(0, 0)]) == [expected]


@pytest.mark.parametrize(
    ("microbatch_tokens", "context", "values", "said"),
    [
        (20, 40, {}, "has 26 tokens, but only 20 fit (batch.microbatch_tokens): cut at its end"),
        (40, 9, {}, "has 26 tokens, but only 9 fit (the model's context): cut at its end"),
        (40, 30, {"max_tokens": 7, "overlong": "drop"}, "has 26 tokens, but only 7 fit (data.max_tokens): dropped"),
        (
            40,
            30,
            {"max_tokens": 1},
            "but only 1 fit (data.max_tokens): dropped, because no trained token would be left",
        ),
    ],
)
def test_what_is_too_long_is_said_with_record_and_reason(
    tmp_path: Path, microbatch_tokens: int, context: int, values: dict, said: str
) -> None:
    sources = source(tmp_path, {"messages": [{"role": "assistant", "content": LETTERS}]})
    example = ChatDataset(sources, Letters(), batch(microbatch_tokens), context, limits(**values))[(0, 0)]
    assert example.too_long.startswith(f"{tmp_path}/data.jsonl:1 ")
    assert example.too_long.endswith(said)


def test_of_a_pair_both_lengths_are_said(tmp_path: Path) -> None:
    sources = source(tmp_path, {"prompt": "a", "chosen": LETTERS, "rejected": LETTERS[:10]})
    example = PairDataset(sources, Letters(), batch(12), None, limits())[(0, 0)]
    assert example.too_long.endswith(
        "has 26 and 10 tokens, but only 6 fit (batch.microbatch_tokens, for both together): cut at its end"
    )
