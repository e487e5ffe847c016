"""Turns by the chat templates of published models: calls are read as they were written, answers come after the sampled
tokens, and what is trained is what supervised fine-tuning would train."""

from typing import Any

import pytest
import torch

from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.messages import Chat
from automodel_rl.data.template import ChatTemplate
from automodel_rl.data.tool_formats import PROBE_TOOL, find_format
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.protocol import Completion
from automodel_rl.quickstart.model import train_tokenizer
from automodel_rl.rollout.episodes.chat_turns import ChatTurns
from automodel_rl.rollout.episodes.episode import Episode, Limits
from automodel_rl.rollout.episodes.tools import ToolEnvironment
from tests.unit.data.stock_templates import CALLING, SILENT, stock_tokenizer

UNKNOWN = tuple(name for name in CALLING if name.startswith(("lfm2", "gemma4", "diffusion_gemma", "muse_glimmer")))
"""Templates whose format of calls is not known."""

READ = tuple(name for name in CALLING if name not in UNKNOWN)

ARGUMENTS = {"text": "Ben's coins, 7", "count": 3}
CALL = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": ARGUMENTS}}
QUESTION = {"role": "user", "content": "How many?"}
TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def turns_of(template: ChatTemplate, most_tokens: int) -> ChatTurns:
    return ChatTurns(template, [PROBE_TOOL], find_format(template), most_tokens)


def written_turn(template: ChatTemplate, before: list[dict[str, Any]], turn: dict[str, Any]) -> str:
    """What the model writes after the header, for a turn."""
    opening = template.text_with_generation_prompt(Chat(before, (PROBE_TOOL,)))
    text = template.text(Chat([*before, turn], (PROBE_TOOL,))) or ""
    return (
        text[len(opening) :]
        if text.startswith(opening)
        else text[text.rindex(template.header) + len(template.header) :]
    )


@pytest.mark.parametrize("name", READ)
def test_an_episode_is_made_of_sampled_turns_and_the_templates_suffixes(name: str) -> None:
    tokenizer = stock_tokenizer(name)
    template = ChatTemplate(tokenizer)
    codec = turns_of(template, 64)
    prompt = codec.prompt_ids([QUESTION])
    mark = tokenizer.convert_ids_to_tokens(min(codec.stop_ids))
    environment = ToolEnvironment({"look_up": lambda text, count: f"{text}: {count} {mark}"}, 5.0)
    episode = Episode(Request(prompt, 5, Sampling(10)), [QUESTION], environment, codec, Limits(999, 4, 9999, 10))
    episode.begin([])
    ids = tokenizer(written_turn(template, [QUESTION], TURN), add_special_tokens=False)["input_ids"]
    ends = [place for place, token in enumerate(ids) if token in codec.stop_ids]
    # GLM's turns end with the token that begins the answer.
    ids = ids[: ends[-1] + 1] if ends else [*ids, tokenizer.convert_tokens_to_ids("<|observation|>")]
    asked = [episode.request.prompt]
    turn = episode.take(Completion(ids, [-0.5] * len(ids), "stop", versions=(1, 1)))
    assert [dict(call) for call in turn.calls] == [{"name": "look_up", "arguments": ARGUMENTS}]
    episode.answer(environment.step(turn))
    asked.append(episode.request.prompt)
    assert asked[1][: len(asked[0]) + len(ids)] == [*asked[0], *ids]
    suffix = tokenizer.decode(asked[1][len(asked[0]) + len(ids) :])
    assert "Ben's coins, 7: 3 " in suffix
    assert f"3 {mark}" not in suffix  # it would end the answer
    last = tokenizer("Three.", add_special_tokens=False)["input_ids"] + [min(codec.stop_ids)]
    episode.answer(environment.step(episode.take(Completion(last, [-0.25] * len(last), "stop", versions=(2, 2)))))
    whole = episode.completion
    assert whole.token_ids == [*ids, *asked[1][len(asked[0]) + len(ids) :], *last]
    assert whole.sampled == [True] * len(ids) + [False] * (len(asked[1]) - len(asked[0]) - len(ids)) + [True] * len(
        last
    )
    assert whole.versions == (1, 2)
    assert whole.last_turn == last


@pytest.mark.parametrize("name", [*SILENT, *UNKNOWN])
def test_templates_that_cannot_call_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        turns_of(ChatTemplate(stock_tokenizer(name)), 64)


SFT_ALIKE = ("qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "llama3_1")
"""Templates that write an earlier turn as it was sampled."""


@pytest.mark.parametrize("name", [*SFT_ALIKE, "quickstart"])
def test_supervised_fine_tuning_trains_the_tokens_that_a_rollout_trains(name: str) -> None:
    tokenizer = train_tokenizer(["look_up"], 300) if name == "quickstart" else stock_tokenizer(name)
    chat_tokenizer = ChatTokenizer(tokenizer, "all")
    answer = {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "7 coins"}
    last = {"role": "assistant", "content": "Seven."}
    sequence = chat_tokenizer(Chat([QUESTION, TURN, answer, last], (PROBE_TOOL,)), "the chat")
    codec = turns_of(chat_tokenizer.template, 64)
    edges = torch.diff(sequence.loss_mask.int(), prepend=torch.tensor([0]), append=torch.tensor([0]))
    starts, ends = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
    ids = sequence.input_ids.tolist()
    assert len(starts) == 2
    turns = [ids[start:end] for start, end in zip(starts, ends, strict=True)]
    assert ids[: starts[0]] == codec.prompt_ids([QUESTION])
    turn = codec.read(ids[: starts[0]], turns[0])
    assert ids[ends[0] : starts[1]] == codec.suffix([answer], turn, turns[0][-1])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "look_up", "arguments"',
        '<tool_call>\n{"name": "look_up"}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        "<tool_call>\n[1, 2]\n</tool_call>",
        "<tool_call>\nnothing\n</tool_call>",
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
    ],
)
@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_calls_that_cannot_be_read_are_told(text: str, end: str) -> None:
    tokenizer = stock_tokenizer("qwen3")
    codec = turns_of(ChatTemplate(tokenizer), 64)
    ids = tokenizer(text + end, add_special_tokens=False)["input_ids"]
    turn = codec.read(codec.prompt_ids([QUESTION]), ids)
    assert not turn.calls
    assert turn.problem.startswith("the call cannot be read")


def test_answers_are_cut_in_the_middle() -> None:
    tokenizer = train_tokenizer(["hello"], 300)
    codec = turns_of(ChatTemplate(tokenizer), 16)
    text = "begin " + "x" * 100_000 + " end"
    turn = codec.read([], tokenizer("Hello", add_special_tokens=False)["input_ids"])
    suffix = tokenizer.decode(codec.suffix([{"role": "user", "content": text}], turn, tokenizer.eos_token_id))
    assert "begin" in suffix
    assert " ... " in suffix
    assert " end" in suffix
    assert len(suffix) < 100
