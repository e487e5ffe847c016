"""Requests as real clients sent them, replayed over HTTP.

`requests.json` was recorded with openai 3.57, openai-agents 0.24, pydantic-ai 2.68, langgraph 1.2.24 with
langchain-openai 1.7.4, smolagents 1.26, litellm 1.110, mini-swe-agent 2.4.6 and anthropic 2.14, each of which ran
against the endpoint. Long instructions of clients are left out, and turns of the tests' tokenizers may be longer.
"""

import json
from pathlib import Path

import pytest

from automodel_rl.generator_messages import Sampling
from tests.unit.rollout.agents.agent_runs import agent_rollouts, prompts, scripted_crew
from tests.unit.rollout.agents.scripted import Message, Script, said
from tests.unit.rollout.agents.test_history import TEMPLATES

REQUESTS = json.loads((Path(__file__).parent / "requests.json").read_text())

THOUGHT = "Ada or Ben?"


def calling(name: str, **arguments: str) -> Message:
    """A turn with a thought that calls a tool."""
    turn = said("", "Ben", thought=THOUGHT)
    turn["tool_calls"][0]["function"] = {"name": name, "arguments": arguments}
    return turn


LOOKING_UP = [
    said("", "Ben", thought=THOUGHT),
    said("", "Ada", thought=THOUGHT),
    said("It is seven.", thought=THOUGHT),
    said("Yes.", thought=THOUGHT),
]
CODE = "Thought: {}.\n<code>\n{}\n</code>"
TURNS: dict[str, list[Message | str]] = {
    "smol_tool": [said("", "Ben", thought=THOUGHT), calling("final_answer", answer="seven")],
    "smol_code": [said(CODE.format("look", "print(look_up('Ben', 2))")), said(CODE.format("done", "final_answer(7)"))],
    "mini": [calling("bash", command="echo 7"), said("I think it is seven."), calling("bash", command="echo done")],
}
FORKS = {
    "smol_tool": {"an answer was changed": 1},  # calls come back as texts
    "smol_code": {"an answer was changed": 1},
    "mini": {"one history continued in two ways": 1},  # a turn without a call is left out
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_requests_of_real_clients_extend_what_was_sampled(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*REQUESTS]
    scripts = [Script(template, TURNS.get(name, LOOKING_UP)) for name in names]
    crew = scripted_crew(scripts, monkeypatch)
    rollouts = agent_rollouts(crew, scripts[0].template, tmp_path, "replaying", max_prompt_tokens=9000)
    asked = prompts(len(names))
    for prompt, name in zip(asked, names, strict=True):
        prompt.example["requests"] = REQUESTS[name]
    groups = rollouts.collect(asked, 1, Sampling(2000))
    rollouts.close()
    crew.close()
    for name, script, (rollout,) in zip(names, scripts, groups, strict=True):
        assert rollout.completion.error == "", name
        assert rollout.score.total == len(REQUESTS[name])
        conversation = rollout.completion.conversation
        assert conversation is not None
        assert conversation.forks == FORKS.get(name, {}), name
        branches = rollout.branches(asked[0])
        assert len(branches) == 1 + len(FORKS.get(name, {})), name
        written = sum(len(completion.token_ids) for _, completion in script.written)
        assert sum(sum(branch.sampled) for branch in branches) == written, name
