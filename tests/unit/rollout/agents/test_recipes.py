"""The agents of configs/agents, with a model by script."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.generator_messages import Sampling
from automodel_rl.rollout.episodes.python_tool import check_sandbox
from automodel_rl.rollout.protocol import Rollout
from tests.unit.rollout.agents.agent_runs import agent_rollouts, prompts, scripted_crew
from tests.unit.rollout.agents.scripted import Message, Script, said, user
from tests.unit.rollout.agents.test_clients import calling

Run = Callable[..., Rollout]


@pytest.fixture
def run_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs one episode of a recipe's agent, given the turns that the model writes."""
    ends: list[Callable[[], None]] = []

    def run(agent: str, turns: Sequence[Message], question: str, **example: Any) -> Rollout:
        script = Script("qwen3", turns)
        crew = scripted_crew([script], monkeypatch)
        rollouts = agent_rollouts(crew, script.template, tmp_path, agent, max_prompt_tokens=9000)
        ends.extend((rollouts.close, crew.close))
        (prompt,) = prompts(1, **example)
        prompt.messages = [user(question)]
        ((rollout,),) = rollouts.collect([prompt], 1, Sampling(2000))
        return rollout

    yield run
    for end in ends:
        end()


def test_a_coding_agent_shows_the_model_what_its_tests_print(run_agent: Run) -> None:
    try:
        check_sandbox("auto")
    except Exception:
        pytest.skip("needs user namespaces")
    wrong, right = (said(f"```python\ndef double(x):\n    return x * {n}\n```") for n in (3, 2))
    tests = ["assert double(0) == 0", "assert double(3) == 6"]
    rollout = run_agent("configs.agents.coding_agent:solve", [wrong, right], "Write double.", tests=tests)
    assert rollout.score.total == pytest.approx(0.9)
    conversation = rollout.completion.conversation
    assert conversation is not None
    assert conversation.metrics["agent_attempts"] == 2
    assert "assert double(3) == 6: AssertionError" in conversation.messages[2]["content"]
    assert len(rollout.branches(prompts(1)[0])) == 1


@pytest.mark.parametrize(("command", "reward"), [("echo 7 > answer", 1.0), ("echo 8 > answer", 0.0)])
def test_a_task_in_a_folder_is_scored_by_its_tests(run_agent: Run, tmp_path: Path, command: str, reward: float) -> None:
    task = tmp_path / "task"
    for name, text in {
        "instruction.md": "Write 7 into answer.",
        "environment/notes": "seven",
        "tests/test.sh": 'grep -q 7 answer && echo 1 > "$REWARD_FILE" || echo 0 > "$REWARD_FILE"\n',
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    turns = [calling("bash", command="cat notes"), calling("bash", command=command), said("Done.")]
    rollout = run_agent("configs.agents.terminal_agent:solve", turns, "Begin.", task=str(task))
    conversation = rollout.completion.conversation
    assert conversation is not None
    assert rollout.score.total == reward
    assert conversation.metrics["agent_commands"] == 2
    assert conversation.messages[2]["content"] == "exit code 0\nseven"
    assert not (task / "environment" / "answer").exists()
