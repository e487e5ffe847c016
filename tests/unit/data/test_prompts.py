"""The stream of prompts: which are left out, what counts them, and where a run goes on."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from automodel_rl.batch import TokenSequence
from automodel_rl.config import SourceConfig
from automodel_rl.data.messages import Chat
from automodel_rl.data.prompts import Prompt, PromptStream
from automodel_rl.errors import InputError

LENGTHS = (3, 9, 1, 4, 8, 2, 7)
"""Words of each prompt; those of more than 4 are too long."""


class Words:
    """In place of a `ChatTokenizer`: a token for each word."""

    def generation_prompt(self, chat: Chat, where: str) -> TokenSequence:
        ids = torch.tensor([int(word) for message in chat.messages for word in message["content"].split()])
        return TokenSequence(ids, torch.zeros(len(ids), dtype=torch.bool))


def stream_of(folder: Path, seed: int | None, lengths: tuple[int, ...] = LENGTHS) -> PromptStream:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": " ".join([str(n)] * n), "answer": "x"}) + "\n" for n in lengths))
    chat: Any = Words()
    return PromptStream((SourceConfig(path=str(file)),), chat, 4, seed)


def told(prompts: list[Prompt]) -> list[tuple[int, int]]:
    return [(prompt.number, len(prompt.token_ids)) for prompt in prompts]


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, None)
    stream.check_fit()
    assert stream.state_dict() == {"num_drawn": 0, "num_overlong": 0, "num_refused": 0}
    assert told(stream.take(3)) == [(0, 3), (2, 1), (3, 4)]
    assert (stream.num_drawn, stream.num_overlong) == (4, 1)
    assert told(stream.take(2)) == [(5, 2), (7, 3)]
    assert (stream.num_drawn, stream.num_overlong) == (8, 3)
    held_out = stream_of(tmp_path, None)
    assert told(held_out.every_prompt()) == [(0, 3), (2, 1), (3, 4), (5, 2)]
    assert held_out.num_overlong == 3


def test_prompts_that_are_refused_are_counted_where_they_may_be_left_out(tmp_path: Path) -> None:
    file, chat = tmp_path / "prompts.jsonl", Words()
    source = SourceConfig(path=str(file))
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("1", None, [], "2")))
    stream = PromptStream((source,), cast(Any, chat), 4, None, drops_refused=True)
    assert [prompt.number for prompt in stream.take(2)] == [0, 3]
    assert (stream.num_refused, stream.num_overlong) == (2, 0)
    with pytest.raises(InputError, match=r"prompts.jsonl:2: "):
        PromptStream((source,), cast(Any, chat), 4, None).take(2)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("taken", [0, 1, 5, 9])
def test_a_resumed_stream_is_the_one_that_was_left(tmp_path: Path, seed: int | None, taken: int) -> None:
    stream, again = stream_of(tmp_path, seed), stream_of(tmp_path, seed)
    again.check_fit()
    stream.take(taken)
    again.load_state_dict(stream.state_dict())
    assert again.state_dict() == stream.state_dict()
    assert told(again.take(11)) == told(stream.take(11))
    assert again.state_dict() == stream.state_dict()


def test_seeds_and_passes_have_orders_of_their_own(tmp_path: Path) -> None:
    orders = [[length for _, length in told(stream_of(tmp_path, seed).take(24))] for seed in range(4)]
    passes = {tuple(order[start : start + 4]) for order in orders for start in range(0, 24, 4)}
    assert all(sorted(one) == [1, 2, 3, 4] for one in passes)
    assert len(passes) > 8


def test_a_stream_in_which_no_prompt_fits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="all 3 prompts are longer than rollout.max_prompt_tokens=4"):
        stream_of(tmp_path, 1, (5, 6, 7)).check_fit()
    assert told(stream_of(tmp_path, None, (5, 6, 7, 1)).take(2)) == [(3, 1), (7, 1)]
