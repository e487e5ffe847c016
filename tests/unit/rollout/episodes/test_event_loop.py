"""What environments and tools open in one async call works in the next."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl.rollout.episodes.adapters import from_tinker, from_trl
from automodel_rl.rollout.episodes.protocol import Turn
from automodel_rl.rollout.episodes.tools import ToolEnvironment

CALL = Turn("", "", ({"name": "send", "arguments": {"text": "a"}},))


class Line:
    """A connection, as a queue and its reader are: it belongs to the loop on which it was opened."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str] = asyncio.Queue()
        self.reader = asyncio.get_running_loop().create_task(self.read())
        self.answers: asyncio.Queue[str] = asyncio.Queue()

    async def read(self) -> None:
        while True:
            self.answers.put_nowait(f"got {await self.queue.get()}")

    async def ask(self, text: str) -> str:
        self.queue.put_nowait(text)
        return await asyncio.wait_for(self.answers.get(), 5)


class Tools:
    """As TRL takes it."""

    async def reset(self, **columns: Any) -> str:
        self.line = Line()
        return await self.line.ask("reset")

    async def send(self, text: str) -> str:
        """Sends.

        Args:
            text: the text.
        """
        return await self.line.ask(text)

    async def get_reward(self) -> float:
        return float(await self.line.ask("reward") == "got reward")


class Messages:
    """As tinker-cookbook takes it."""

    async def initial_observation(self) -> list[Any]:
        self.line, self.messages = Line(), [{"role": "user", "content": "Hello"}]
        return self.messages

    async def step(self, message: Any) -> Any:
        answer = {"role": "user", "content": await self.line.ask(message["content"])}
        self.messages = [*self.messages, message, answer]
        return SimpleNamespace(reward=1.0, episode_done=False, next_messages=self.messages, metrics={})


def test_async_methods_of_trl_environments_share_a_loop() -> None:
    environment = from_trl(Tools)({"messages": []}, 0)
    assert environment.reset() == [{"role": "user", "content": "got reset"}]
    outcomes = [environment.step(CALL) for _ in range(2)]
    assert [outcome.messages[0]["content"] for outcome in outcomes] == ["got a", "got a"]
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0]  # the sum is what get_reward says


def test_async_methods_of_tinker_environments_share_a_loop() -> None:
    environment = from_tinker(lambda example: Messages())({"messages": [{"role": "user", "content": "Hello"}]}, 0)
    assert environment.reset() == []
    for text in ("one", "two"):
        (answer,) = environment.step(Turn(text, text)).messages
        assert answer["content"] == f"got {text}"


@pytest.mark.parametrize("hangs", [False, True])
def test_async_tools_share_a_loop_also_after_one_that_took_too_long(hangs: bool) -> None:
    found: list[Any] = []

    async def send(text: str) -> str:
        if hangs and len(found) == 1:
            found.append("cut off")
            await asyncio.sleep(60)
        if not found:
            found.append(Line())
        return await found[0].ask(text)  # type: ignore[no-any-return]

    environment = ToolEnvironment({"send": send}, 0.5)
    answers = [environment.step(CALL).messages[0]["content"] for _ in range(3)]
    assert answers == ["got a", "error: send took longer than 0.5 s" if hangs else "got a", "got a"]
