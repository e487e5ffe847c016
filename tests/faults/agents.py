"""Bugs of agents: which turns a request goes on after, which of them count, and how often."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

from automodel_rl.batch import Batch
from automodel_rl.rollout.agents.history import History, SampledTurn
from automodel_rl.rollout.agents.sameness import NormalizedMessage
from tests.faults.fault import Fault, patch


def _shared_turns_count_in_each_row() -> Any:
    branches = History.branches

    def every(history: History) -> Any:
        of_leaves = zip(branches(history), history.leaves, strict=True)
        return [dataclasses.replace(branch, sampled=leaf.transcript.sampled) for branch, leaf in of_leaves]

    return mock.patch.object(History, "branches", every)


def _same_by(changed: Any) -> Any:
    """A message is compared in another form, given what is known of it and what was sent."""
    is_same = NormalizedMessage.is_same
    return mock.patch.object(NormalizedMessage, "is_same", lambda told, message: is_same(*changed(told, message)))


def _thoughts_must_come_back(told: Any, message: Any) -> Any:
    thoughts = message.get("reasoning_content", "").strip()
    return told, message if thoughts == told.reasoning else {**message, "content": "other"}


def _any_text_is_the_answer(told: Any, message: Any) -> Any:
    return (told, {**message, "content": told.texts[0]}) if told.is_sampled and told.texts else (told, message)


def _calls_by_their_json(told: Any, message: Any) -> Any:
    return told, message if not message.get("tool_calls") else {**message, "content": repr(message["tool_calls"])}


def _all_that_nothing_follows() -> Any:
    """Turns that were asked for again are rows, too."""

    def every(history: History) -> list[SampledTurn]:
        ends = [turn for turn in history.turns if not turn.children]
        return ends[-1:] + ends[:-1]

    return mock.patch.object(History, "leaves", property(every))


def _whatever_the_tools() -> Any:
    find = History._find

    def blind(history: History, messages: Any, tools: str) -> Any:
        known = [(turn, turn.tools) for turn in history.turns]
        for turn, _ in known:
            turn.tools = tools
        try:
            return find(history, messages, tools)
        finally:
            for turn, before in known:
                turn.tools = before

    return mock.patch.object(History, "_find", blind)


def _encoded_again() -> Any:
    """The tokens before a turn are those of its text."""
    turn_prompt = History.turn_prompt

    def again(history: History, messages: Any, tools: str, codec: Any) -> Any:
        found = turn_prompt(history, messages, tools, codec)
        if found.parent is None:
            return found
        prompt = codec.tokenizer(codec.tokenizer.decode(found.prompt), add_special_tokens=False)["input_ids"]
        return dataclasses.replace(found, prompt=prompt)

    return mock.patch.object(History, "turn_prompt", again)


def _twins_alike() -> Any:
    from automodel_rl.rollout.seeds import turn_seed

    return patch("rollout.agents.episode.turn_seed", lambda seed, prompt, _: turn_seed(seed, prompt))


def _rows_count() -> Any:
    return mock.patch.object(Batch, "num_episodes", property(len))


def _tokens_of_rows() -> Any:
    of_episodes = Batch.episode_tokens

    def of_rows(batch: Batch) -> Any:
        return of_episodes.fget(Batch(batch.sequences))  # type: ignore[attr-defined]

    return mock.patch.object(Batch, "episode_tokens", property(of_rows))


def _results_as_they_came(messages: Sequence[Any], start: int) -> list[Any]:
    return [*itertools.takewhile(lambda message: message["role"] == "tool", messages[start:])]


def _parts_are_turns() -> Any:
    return patch("chat_api.responses.joined_turns", lambda messages: [*messages])


def _only_limits_of_the_run_cut() -> Any:
    """Turns that a limit of the agent has cut are gone on with, as if they had ended."""
    after = History._after

    def lenient(history: History, parent: SampledTurn, *arguments: Any) -> Any:
        parent.turn = dataclasses.replace(parent.turn, is_truncated=parent.is_truncated)
        return after(history, parent, *arguments)

    return mock.patch.object(History, "_after", lenient)


HISTORY = "unit/rollout/agents/test_history.py::test_rows_are_what_was_sampled_whatever_an_agent_sends"
COUNTS = "unit/trainers/test_rollout_batch.py::test_an_episode_counts_once_however_many_rows_it_has"

CHOICES = "unit/chat_api/test_tool_choices.py"

FAULTS: dict[str, Fault] = {
    "results of calls in the order in which they came": Fault(
        lambda: patch("chat_api.messages._results", _results_as_they_came),
        f"{CHOICES}::test_results_come_in_the_order_of_their_calls",
    ),
    "a stop text told as the end of a turn": Fault(
        lambda: patch("chat_api.anthropic._end", lambda _: {"stop_reason": "end_turn", "stop_sequence": None}),
        f"{CHOICES}::test_a_stop_text_is_told",
    ),
    "a turn that rows share counts in each": Fault(_shared_turns_count_in_each_row, HISTORY),
    "thoughts must come back": Fault(lambda: _same_by(_thoughts_must_come_back), HISTORY),
    "an answer that was changed is taken for the sampled one": Fault(
        lambda: _same_by(_any_text_is_the_answer), HISTORY
    ),
    "calls are compared by their JSON": Fault(lambda: _same_by(_calls_by_their_json), HISTORY),
    "turns that were asked for again are trained": Fault(_all_that_nothing_follows, HISTORY),
    "turns that the agent's own limit has cut are gone on with": Fault(_only_limits_of_the_run_cut, HISTORY),
    "a history goes on with other tools": Fault(_whatever_the_tools, HISTORY),
    "an agent's history is encoded again": Fault(_encoded_again, HISTORY),
    "calls with the same messages have the same seed": Fault(_twins_alike, HISTORY),
    "an episode counts as often as it has rows": Fault(_rows_count, COUNTS),
    "a row's mean is over its own tokens": Fault(_tokens_of_rows, COUNTS),
    "parts of a turn are turns": Fault(
        _parts_are_turns, "unit/rollout/agents/test_clients.py::test_requests_of_real_clients_extend_what_was_sampled"
    ),
}
