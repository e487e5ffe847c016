"""What agents send again is matched to what was sampled: every row has the tokens as they were sampled, and every turn
counts once."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from automodel_rl.rollout.agents.history import History
from tests.unit.rollout.agents.scripted import LOOK_UP, Ask, Script, run_case, said, system, user

TEMPLATES = ("qwen3", "qwen3_5_think", "glm4moe", "gptoss")


def result(call: dict[str, Any], text: str = "7") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


async def two_turns(ask: Ask) -> None:
    m = [user("How many coins?")]
    m += [await ask(m), user("Sure?")]
    await ask(m)


async def json_in_another_form(ask: Ask) -> None:
    m = [user("Ask.")]
    a = await ask(m, tools=[LOOK_UP])
    function = a["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), separators=(",", ":"), sort_keys=True)
    a.pop("content")
    a |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    m += [a, result(a["tool_calls"][0])]
    await ask(m, tools=[LOOK_UP])


async def ids_of_its_own(ask: Ask) -> None:
    m = [user("Ask.")]
    a = await ask(m, tools=[LOOK_UP])
    a["tool_calls"][0]["id"] = "abc123XYZ"
    m += [a, result(a["tool_calls"][0])]
    await ask(m, tools=[LOOK_UP])


async def two_calls(ask: Ask) -> None:
    m = [user("Ask.")]
    a = await ask(m, tools=[LOOK_UP])
    first, second = a["tool_calls"]
    m += [a, result(second, "8"), result(first)]
    await ask(m, tools=[LOOK_UP])


async def drops_thoughts(ask: Ask) -> None:
    m = [user("Ask.")]
    a = await ask(m, tools=[LOOK_UP])
    a.pop("reasoning_content")
    m += [a, result(a["tool_calls"][0])]
    b = await ask(m, tools=[LOOK_UP])
    b.pop("reasoning_content")
    m += [b, user("Sure?")]
    await ask(m, tools=[LOOK_UP])


async def keeps_thoughts(ask: Ask) -> None:
    m = [user("Ask.")]
    a = await ask(m, tools=[LOOK_UP])
    m += [a, result(a["tool_calls"][0])]
    await ask(m, tools=[LOOK_UP])


async def trims(ask: Ask) -> None:
    m = [user("Ask.")]
    a = await ask(m)
    a["content"] = a["content"].strip()
    m += [a, user("Sure?")]
    await ask(m)


async def parts(ask: Ask) -> None:
    m = [user("Ask.")]
    a = await ask(m)
    a["content"] = [{"type": "text", "text": a["content"]}]
    m[0] = {"role": "user", "content": [{"type": "text", "text": "Ask."}]}
    m += [a, user("Sure?")]
    await ask(m)


async def edits_an_answer(ask: Ask) -> None:
    m = [user("How many?")]
    a = await ask(m)
    a["content"] = a["content"].replace("seven", "eight")
    m += [a, user("Sure?")]
    await ask(m)


async def edits_an_earlier_message(ask: Ask) -> None:
    m = [user("How many?")]
    m += [await ask(m), user("Sure?")]
    m += [await ask(m), user("Really?")]
    m[2] = user("Are you sure?")
    await ask(m)


async def sub_agent(ask: Ask) -> None:
    m = [system("main"), user("Ask.")]
    a = await ask(m, tools=[LOOK_UP])
    s = [system("helper"), user("Find Ben.")]
    s += [await ask(s), user("More.")]
    await ask(s)
    m += [a, result(a["tool_calls"][0], "helper says 7")]
    await ask(m, tools=[LOOK_UP])


async def sdk_retry(ask: Ask) -> None:
    m = [user("How many?")]
    await ask(m)
    m += [await ask(m, retry=1), user("Sure?")]
    await ask(m)


async def same_again(ask: Ask) -> None:
    m = [user("How many?")]
    await ask(m)
    m += [await ask(m), user("Sure?")]
    await ask(m)


async def siblings(ask: Ask) -> None:
    m = [user("How many?")]
    m += [await ask(m)]
    await ask([*m, user("As a poem.")])
    await ask([*m, user("As a joke.")])


async def compaction(ask: Ask) -> None:
    m = [user("How many?")]
    m += [await ask(m), user("Sure?")]
    m += [await ask(m)]
    await ask([user("How many? Summary so far: seven."), user("Go on.")])


async def tools_changed(ask: Ask) -> None:
    m = [user("Ask.")]
    a = await ask(m, tools=[LOOK_UP])
    other = copy.deepcopy(LOOK_UP)
    other["function"]["name"] = "find"  # type: ignore[index]
    m += [a, result(a["tool_calls"][0])]
    await ask(m, tools=[LOOK_UP, other])


async def system_changed(ask: Ask) -> None:
    m = [system("time 10:01"), user("Ask.")]
    m += [await ask(m), user("Sure?")]
    m[0] = system("time 10:02")
    await ask(m)


async def goes_on_after_a_cut_turn(ask: Ask) -> None:
    m = [user("Ask.")]
    m += [await ask(m), user("Go on.")]
    await ask(m)


async def turn_of_its_own(ask: Ask) -> None:
    m = [user("Ask.")]
    m += [await ask(m), {"role": "assistant", "content": "agent wrote this"}, user("Sure?")]
    await ask(m)


async def answer_left_out(ask: Ask) -> None:  # as mini-swe-agent does with a turn without a call
    m = [user("Ask.")]
    m += [await ask(m, tools=[LOOK_UP]), result({"id": "x"})]
    await ask(m, tools=[LOOK_UP])
    await ask([*m, user("Call a tool.")], tools=[LOOK_UP])


async def seven_turns(ask: Ask) -> None:
    m = [user("Ask.")]
    for _ in range(6):
        m += [await ask(m), user("Sure?")]
    await ask(m)


SEVEN, YES = said("It is seven."), said("Yes.")
THOUGHT = "Ada or Ben?"
CASES = {
    two_turns: ([SEVEN, YES], 1, 0, {}),
    seven_turns: ([SEVEN] * 7, 1, 0, {}),
    json_in_another_form: ([said("", "Ben"), SEVEN], 1, 0, {}),
    ids_of_its_own: ([said("", "Ben"), SEVEN], 1, 0, {}),
    two_calls: ([said("", "Ben", "Ada"), SEVEN], 1, 0, {}),
    drops_thoughts: ([said("", "Ben", thought=THOUGHT), said("It is seven.", thought=THOUGHT), YES], 1, 0, {}),
    keeps_thoughts: ([said("", "Ben", thought=THOUGHT), SEVEN], 1, 0, {}),
    trims: ([said("It is seven. "), YES], 1, 0, {}),
    parts: ([SEVEN, YES], 1, 0, {}),
    edits_an_answer: ([SEVEN, YES], 2, 0, {"an answer was changed": 1}),
    edits_an_earlier_message: ([SEVEN, YES, YES], 2, 0, {"an earlier message was changed": 1}),
    sub_agent: (
        [said("", "Ben"), said("Ben."), said("Ben, 7."), SEVEN],
        2,
        0,
        {"tools changed": 1},
    ),
    sdk_retry: ([SEVEN, YES], 1, 0, {}),
    same_again: ([said("It is six."), SEVEN, YES], 1, 1, {"the same messages were sent again": 1}),
    siblings: ([SEVEN, said("Roses."), said("Ha.")], 2, 0, {"one history went on in two ways": 1}),
    compaction: ([SEVEN, YES, SEVEN], 2, 0, {"another conversation began": 1}),
    tools_changed: ([said("", "Ben"), SEVEN], 2, 0, {"tools changed": 1}),
    system_changed: ([SEVEN, YES], 2, 0, {"the system text changed": 1}),
    goes_on_after_a_cut_turn: (["Once upon", YES], 2, 0, {"a turn that was cut off was gone on with": 1}),
    turn_of_its_own: ([SEVEN, YES], 2, 0, {"a message of assistant was added to the history": 1}),
    answer_left_out: ([said("", "Ben"), SEVEN, YES], 2, 0, {"one history went on in two ways": 1}),
}
"""By agent: what the sampler writes, the number of rows, of turns that are left out, and forks by reason."""


def check_rows(script: Script, history: History, left_out: int) -> int:
    """Every row has prompts and turns as the generator had them. Returns how many tokens encoding the text again would
    change."""
    branches = history.branches()
    counted = []
    drift = 0
    for branch, leaf in zip(branches, history.leaves, strict=True):
        row, counts = branch.prompt + branch.token_ids, [False] * len(branch.prompt) + branch.sampled
        for turn in leaf.path:
            request, completion = next(w for w in script.written if w[1] is turn.completion)
            start, stop = len(request.prompt), len(request.prompt) + len(completion.token_ids)
            assert row[:start] == request.prompt
            assert row[start:stop] == completion.token_ids
            assert ([0.0] * len(branch.prompt) + branch.logprobs)[start:stop] == completion.logprobs
            assert len({*counts[start:stop]}) == 1
            if counts[start]:
                counted.append(id(completion))
        assert sum(counts) == sum(len(turn.completion.token_ids) for turn in leaf.path if id(turn.completion) in counted
                                  and counts[len(turn.token_ids) - 1])  # fmt: skip
        again = script.tokenizer(script.tokenizer.decode(row), add_special_tokens=False)["input_ids"]
        drift += again != row
    assert len(counted) == len({*counted}) == len(script.written) - left_out
    return drift


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("agent", CASES, ids=lambda agent: agent.__name__)
def test_rows_are_what_was_sampled_whatever_an_agent_sends(name: str, agent: Any) -> None:
    if agent is two_calls and name == "gptoss":
        pytest.skip("a turn of gpt-oss ends with its first call")
    turns, num_rows, left_out, forks = CASES[agent]
    script = Script(name, turns)
    episode = run_case(script, agent)
    history = episode.history
    assert len(script.written) == len(turns)
    assert len(history.leaves) == num_rows
    assert history.forks() == forks
    assert check_rows(script, history, left_out) == num_rows  # every row would change
    completion = episode.completion
    assert completion.conversation is not None
    assert len(completion.branches([])) == num_rows
    assert completion.branches([])[0].prompt == completion.conversation.prompt
    assert completion.versions == (1, 1)
    seeds = [request.seed for request, _ in script.written]
    assert len({*seeds}) == len(seeds)


def test_calls_read_from_the_history_are_those_that_were_written() -> None:
    for name in TEMPLATES[:3]:
        script = Script(name, [said("", "Ben", "Ada", thought=THOUGHT), SEVEN])
        episode = run_case(script, two_calls)
        first = episode.history.turns[0].answer
        assert [(call.name, call.arguments) for call in first.calls] == [
            ("look_up", {"who": "Ben", "n": 2}),
            ("look_up", {"who": "Ada", "n": 2}),
        ]
        assert first.reasoning.strip() == THOUGHT
        assert first.content.strip() == ""
        assert first.finish_reason == "tool_calls"
        assert episode.history.turns[1].answer.content.strip() == "It is seven."


def test_an_earlier_version_of_a_turn_makes_the_episode_as_old() -> None:
    script = Script("qwen3", [SEVEN, YES])
    write, versions = script.write, iter([(2, 2), (4, 5)])
    script.write = lambda request: dataclasses.replace(write(request), versions=next(versions))  # type: ignore[method-assign]
    assert run_case(script, two_turns).completion.versions == (2, 5)
