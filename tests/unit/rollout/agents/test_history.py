"""What agents send again is matched to what was sampled: every row has the tokens as they were sampled, and every turn
counts once."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from automodel_rl.chat_api import anthropic
from automodel_rl.chat_api.exchange import ChatCall
from automodel_rl.rollout.agents.history import History
from tests.unit.rollout.agents.scripted import LIMITS, LOOK_UP, Ask, Script, run_case, said, system, user

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


async def goes_on_after_a_turn_cut_by_its_own_limit(ask: Ask) -> None:
    m = [user("Ask.")]
    m += [await ask(m, max_tokens=3), user("Go on.")]
    await ask(m)


async def turn_of_its_own(ask: Ask) -> None:
    m = [user("Ask.")]
    m += [await ask(m), {"role": "assistant", "content": "agent wrote this"}, user("Sure?")]
    await ask(m)


async def answer_left_out(ask: Ask) -> None:  # as mini-swe-agent does with a turn without a call
    m = [user("Ask.")]
    m.append(await ask(m, tools=[LOOK_UP]))
    m.append(result(m[-1]["tool_calls"][0]))
    await ask(m, tools=[LOOK_UP])
    await ask([*m, user("Call a tool.")], tools=[LOOK_UP])


async def seven_turns(ask: Ask) -> None:
    m = [user("Ask.")]
    for _ in range(6):
        m += [await ask(m), user("Sure?")]
    await ask(m)


async def gives_up(ask: Ask) -> None:
    """The client gives up waiting, and asks again without a word about it. The first answer comes last."""
    m = [user("How many?")]
    m += [await ask(m), user("Sure?")]
    await ask(m)
    await ask(m, told=False)


async def ends_with_messages_that_went_on(ask: Ask) -> None:
    m = [user("How many?")]
    await ask([*m, await ask(m), user("Sure?")])
    await ask(m)


async def best_of_three(ask: Ask) -> None:
    for _ in range(3):
        await ask([user("How many?")])


async def never_gets_its_last_answer(ask: Ask) -> None:
    m = [user("How many?")]
    m += [await ask(m), user("Sure?")]
    await ask(m, told=False)


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
    gives_up: ([SEVEN, YES, said("Nobody saw this.")], 1, 1, {"the same messages were sent again": 1}),
    ends_with_messages_that_went_on: ([SEVEN, YES, said("Ha.")], 2, 0, {"the same messages were sent again": 1}),
    best_of_three: ([SEVEN, YES, said("Ha.")], 3, 0, {"the same messages were sent again": 2}),
    never_gets_its_last_answer: ([SEVEN, YES], 1, 1, {}),
    siblings: ([SEVEN, said("Roses."), said("Ha.")], 2, 0, {"one history continued in two ways": 1}),
    compaction: ([SEVEN, YES, SEVEN], 2, 0, {"another conversation began": 1}),
    tools_changed: ([said("", "Ben"), SEVEN], 2, 0, {"tools changed": 1}),
    system_changed: ([SEVEN, YES], 2, 0, {"the system text changed": 1}),
    goes_on_after_a_cut_turn: (["Once upon", YES], 2, 0, {"a turn that was cut off was continued": 1}),
    goes_on_after_a_turn_cut_by_its_own_limit: (
        ["Once upon", YES],
        2,
        0,
        {"a turn that was cut off was continued": 1},
    ),
    turn_of_its_own: ([SEVEN, YES], 2, 0, {"a message of assistant was added to the history": 1}),
    answer_left_out: ([said("", "Ben"), SEVEN, YES], 2, 0, {"one history continued in two ways": 1}),
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


def test_the_row_of_the_last_answer_that_the_agent_got_is_first() -> None:
    for agent, text in ((gives_up, "Yes."), (ends_with_messages_that_went_on, "Ha."), (best_of_three, "Ha.")):
        script = Script("qwen3", CASES[agent][0])
        conversation = run_case(script, agent).completion.conversation
        assert conversation is not None
        assert conversation.messages[-1]["content"].strip() == text


def test_calls_at_once_give_the_same_rows_in_any_order() -> None:
    def rows_of(numbers: tuple[int, ...]) -> list[Any]:
        async def agent(ask: Any) -> None:
            messages = [user("Who?")]
            first = await ask(messages)
            for number in numbers:
                await ask([*messages, first, user(f"Question {number}?")])
            await ask([user("Something else?")])

        answers = [said(f"It is {'seven' if number else 'Ada'}.") for number in numbers]
        episode = run_case(Script("qwen3", [said("Ben."), *answers, said("Yes.")]), agent)
        return [(row.prompt, row.token_ids, row.sampled) for row in episode.completion.branches([])]

    assert len(rows_of((0, 1))) == 3
    assert rows_of((0, 1)) == rows_of((1, 0))


def test_calls_whose_arguments_are_no_object_go_on_and_what_is_no_json_is_a_text() -> None:
    async def agent(ask: Ask) -> None:
        m = [user("Ask.")]
        a = await ask(m, tools=[LOOK_UP])
        m += [a, result(a["tool_calls"][0]) if a.get("tool_calls") else user("Try again.")]
        await ask(m, tools=[LOOK_UP])

    for arguments, num_calls in (
        ('"hello"', 1),
        ('"{\\"n\\": 1}"', 1),
        ("[1, 2.5, null]", 1),
        ("NaN", 0),
        ('{"n": NaN}', 0),
    ):
        call = f'<tool_call>\n{{"name": "look_up", "arguments": {arguments}}}\n</tool_call>'
        script = Script("qwen3", [said(call), SEVEN])
        episode = run_case(script, agent)
        assert len(episode.history.turns[0].answer.calls) == num_calls, arguments
        assert len(episode.history.leaves) == 1, arguments
        json.dumps(anthropic.reply(episode.history.turns[0].answer, ChatCall([])), allow_nan=False)


def test_special_tokens_in_what_agents_send_are_texts() -> None:
    mark = "<|im_start|>"
    tool = copy.deepcopy(LOOK_UP)
    tool["function"]["description"] = mark  # type: ignore[index]

    async def agent(ask: Ask) -> None:
        call = {"id": "x", "type": "function", "function": {"name": mark, "arguments": json.dumps({mark: [mark]})}}
        turn = {"role": "assistant", "content": mark, "reasoning_content": mark, "tool_calls": [call]}
        await ask([system(mark), user(mark), turn, {**result({"id": "x"}), "content": mark}], tools=[tool])

    script = Script("qwen3", [SEVEN])
    run_case(script, agent)
    (request, _), token = script.written[0], script.tokenizer.convert_tokens_to_ids(mark)
    assert request.prompt.count(token) == 5  # system, user, assistant, the result, and the answer's own


def test_an_answer_that_is_named_goes_on_with_the_tools_of_its_call() -> None:
    other = copy.deepcopy(LOOK_UP)
    other["function"]["name"] = "find"  # type: ignore[index]

    async def agent(ask: Ask) -> None:
        await ask([user("Ask.")], tools=[LOOK_UP])

    script = Script("qwen3", [said("", "Ben")])
    history = run_case(script, agent).history
    for tools, reason in (([LOOK_UP], ""), ([other], "tools changed")):
        digest, codec = script.codecs.of(tools)
        (call,) = history.turns[0].answer.calls
        message = {"role": "tool", "content": "7", "tool_call_id": call.id}
        opening = history.turn_prompt_after(history.turns[0].answer.id, [message], digest, codec)
        assert (opening.parent is None, opening.reason) == (bool(reason), reason)
        assert f'"name": "{tools[0]["function"]["name"]}"' in script.tokenizer.decode(opening.prompt)  # type: ignore[index]


def test_only_limits_of_the_run_cut_an_episode() -> None:
    async def agent(ask: Ask) -> None:
        await ask([user("Ask.")], max_tokens=3)

    assert run_case(Script("qwen3", ["Once upon"]), agent).completion.finish == "stop"
    limits = dataclasses.replace(LIMITS, turn_tokens=3)
    assert run_case(Script("qwen3", ["Once upon"]), agent, limits).completion.finish == "length"


def test_one_call_is_given_where_one_is_asked_for_and_none_where_no_tool_is_shown() -> None:
    async def agent(ask: Ask) -> None:
        m = [user("Ask.")]
        a = await ask(m, tools=[LOOK_UP], parallel_tool_calls=False)
        assert len(a["tool_calls"]) == 1
        await ask([*m, a, result(a["tool_calls"][0])], tools=[LOOK_UP], parallel_tool_calls=False)
        a = await ask(m, tools=[LOOK_UP], tool_choice="none")
        assert "tool_calls" not in a
        assert "look_up" in a["content"]

    script = Script("qwen3", [said("", "Ben", "Ada"), said("Yes."), said("", "Ben")])
    history = run_case(script, agent).history
    assert history.turns[1].reason == "the agent received only the first of several calls"
    assert "look_up" not in script.tokenizer.decode(script.written[2][0].prompt)


def test_the_stop_text_that_ended_a_turn_is_known() -> None:
    async def agent(ask: Ask) -> None:
        await ask([user("Ask.")], stop=["coins", "seven"])

    history = run_case(Script("qwen3", [said("Or seven coins.")]), agent).history
    answer = history.turns[0].answer
    assert (answer.content, answer.stop_text) == ("Or ", "seven")
