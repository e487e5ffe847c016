"""Real clients, each in an environment of its own that pip makes, call the endpoint; `longer` ones alone do so."""

import subprocess
import sys
from pathlib import Path

import pytest

from automodel_rl.generator_messages import Sampling
from tests.unit.rollout.agents.agent_runs import agent_rollouts, prompts, scripted_crew
from tests.unit.rollout.agents.scripted import Script, user
from tests.unit.rollout.agents.test_clients import LOOKING_UP, TURNS

CLIENTS = Path(__file__).parents[3] / "agent_clients"

PACKAGES = {
    "openai": (["openai"], [["openai_chat"]]),
    "openai-agents": (
        ["openai-agents"],
        [
            ["openai_agents", "chat_completions"],
            ["openai_agents", "chat_completions", "streamed"],
            ["openai_agents", "responses"],
            ["openai_agents", "responses", "streamed"],
        ],
    ),
    "pydantic-ai": (["pydantic-ai-slim[openai]"], [["pydantic_ai_chat"]]),
    "anthropic": (["anthropic"], [["anthropic_messages"]]),
    "langgraph": (
        ["langgraph", "langchain", "langchain-openai"],
        [["langgraph_agent"], ["langgraph_agent", "streamed"]],
    ),
    "smolagents": (["smolagents[openai]"], [["smolagents_tools"]]),
}
"""By client: what pip installs, and the scripts with their arguments."""


@pytest.mark.parametrize("client", PACKAGES)
def test_a_real_client_trains_what_was_sampled(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages, commands = PACKAGES[client]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=False, capture_output=True)
    if installed.returncode:
        pytest.skip(f"pip cannot install {packages}: {installed.stderr.decode()[-200:]}")
    is_text = client == "smolagents"
    scripts = [Script("qwen3", TURNS["smol_tool"] if is_text else LOOKING_UP) for _ in commands]
    crew = scripted_crew(scripts, monkeypatch)
    rollouts = agent_rollouts(crew, scripts[0].template, tmp_path, "command", max_prompt_tokens=9000)
    asked = prompts(len(commands))
    for prompt, (script, *arguments) in zip(asked, commands, strict=True):
        prompt.example["command"] = [python, str(CLIENTS / f"{script}.py"), *arguments]
        prompt.messages = [user("Ask.")]
    groups = rollouts.collect(asked, 1, Sampling(2000))
    rollouts.close()
    crew.close()
    for command, script, (rollout,) in zip(commands, scripts, groups, strict=True):
        assert rollout.completion.error == "", command
        branches = rollout.branches(asked[0])
        assert len(branches) == (2 if is_text else 1), command
        written = sum(len(completion.token_ids) for _, completion in script.written)
        assert sum(sum(branch.sampled) for branch in branches) == written, command
