"""Environments of other systems behave here as in their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers.utils import get_json_schema

from automodel_rl.rollout.episodes.adapters import from_skyrl_gym, from_tinker, from_trl
from automodel_rl.rollout.episodes.outcomes import checked_messages, checked_outcome
from automodel_rl.rollout.episodes.protocol import Outcome, Turn
from tests.tiny import save_tiny_model
from tests.unit.data.stock_templates import stock_tokenizer

PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]


class Purse:
    """An environment as TRL takes it."""

    def __init__(self) -> None:
        self.coins = 0

    def reset(self, start: int, **columns: Any) -> str | None:
        self.coins = start
        return f" You have {start}."

    def add(self, count: int) -> str:
        """Adds coins.

        Args:
            count: How many.
        """
        self.coins += count
        return f"{self.coins} coins"

    def get_reward(self) -> float:
        return float(self.coins)


def test_methods_of_trl_environments_are_tools() -> None:
    make = from_trl(Purse)
    (schema,) = vars(make)["tools"]
    assert schema["function"]["name"] == "add"
    environment = make({"start": 2, "messages": PROMPT}, 0)
    assert checked_messages(environment.reset(), "reset") == [{"role": "user", "content": " You have 2."}]
    calls = [{"name": "add", "arguments": {"count": 3}}, {"name": "add", "arguments": {"count": "x"}}]
    outcome = checked_outcome(environment.step(Turn("", calls=calls)))
    assert [message["content"][:7] for message in outcome.messages] == ["5 coins", "error: "]
    assert (outcome.done, outcome.reward, outcome.metrics["failed_calls"]) == (False, 5.0, 1.0)
    last = environment.step(Turn("I have 5."))
    assert (last.done, last.reward) == (True, 0.0)  # the sum is what get_reward says at the end


def test_trl_finds_the_same_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl import GRPOConfig, GRPOTrainer

    save_tiny_model(tmp_path, dtype=torch.float32, vocab_size=400)
    trainer = GRPOTrainer(
        str(tmp_path),
        args=GRPOConfig(str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False),
        train_dataset=Dataset.from_list([{"prompt": PROMPT, "start": 2}]),
        processing_class=stock_tokenizer("qwen3"),
        environment_factory=Purse,
    )
    assert [get_json_schema(tool) for tool in trainer.tools] == vars(from_trl(Purse))["tools"]


def test_skyrl_gym_environments_read_texts() -> None:
    skyrl_gym = pytest.importorskip("skyrl_gym")

    def factory(example: dict[str, Any]) -> Any:
        return skyrl_gym.make(
            "gsm8k_multi_turn", extras={"reward_spec": {"ground_truth": example["answer"]}, "max_turns": 3}
        )

    environment = from_skyrl_gym(factory)({"answer": "5", "messages": PROMPT}, 0)
    own = factory({"answer": "5"})
    own.init([dict(message) for message in PROMPT])
    assert environment.reset() == []
    for text in ("I think so.", "#### 5"):
        outcome, expected = checked_outcome(environment.step(Turn(text))), own.step(text)
        assert outcome.messages == expected["observations"]
        assert (outcome.done, outcome.reward) == (expected["done"], expected["reward"])
    environment.close()


def test_tinker_environments_exchange_whole_conversations() -> None:
    pytest.importorskip("tinker_cookbook")
    from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult

    class Sums(MessageEnv):
        def __init__(self) -> None:
            self.messages: list[Any] = []

        async def initial_observation(self) -> list[Any]:
            self.messages = [*PROMPT]
            return self.messages

        async def step(self, message: Any) -> Any:
            arguments = json.loads(message["tool_calls"][0].function.arguments) if "tool_calls" in message else None
            answer = {"role": "tool", "content": str(arguments), "name": "add"}
            self.messages = [*self.messages, message, answer]
            return MessageStepResult(1.5, arguments is None, self.messages, {"seen": 1.0})

    environment = from_tinker(lambda example: Sums())({"messages": PROMPT}, 0)
    assert environment.reset() == []
    outcome = checked_outcome(environment.step(Turn("", calls=[{"name": "add", "arguments": {"a": 2}}])))
    assert outcome == Outcome([{"role": "tool", "content": "{'a': 2}", "name": "add"}], False, 1.5, {"seen": 1.0})
    assert environment.step(Turn("5")).done
    other = from_tinker(lambda example: Sums())({"messages": [{"role": "user", "content": "Hello"}]}, 0)
    with pytest.raises(ValueError, match="does not begin with the prompt"):
        other.reset()
