"""Rewards of users: slow ones, async ones, batches, and some that misbehave."""

import asyncio
import time


def slow(completion: str, example: dict, seconds: float) -> float:
    time.sleep(60 if completion == "never" else seconds)
    return float(len(completion))


async def judge(completion: str, example: dict, seconds: float) -> tuple[float, dict]:
    """An async reward that sleeps, raises, blocks its process or ends it."""
    if completion == "raise":
        raise RuntimeError("no way")
    if completion.startswith("block"):
        time.sleep(0.8 if completion == "block briefly" else 60)
    if completion == "exit":
        raise SystemExit(3)
    await asyncio.sleep(60 if completion == "never" else seconds)
    return float(len(completion)), {"words": len(completion.split()), "seen": True}


def plain_judge(completion: str, example: dict) -> float | None:
    """A reward that fails in ways of its own and in those of the world."""
    if completion in ERRORS:
        raise ERRORS[completion]
    return None if completion == "abstain" else float(len(completion))


ERRORS = {"down": RuntimeError("503"), "gone": ConnectionError("no"), "odd": ValueError("no digit"), "key": KeyError(1)}


def ranks(completions: list[str], examples: list[dict]) -> list[float]:
    """A batch reward: each completion's place by length."""
    if "short" in completions:
        return [0.0]
    order = sorted(completions, key=len)
    return [
        order.index(completion) + example["base"] for completion, example in zip(completions, examples, strict=True)
    ]


def scored(completion: str, example: dict) -> object:
    return {"nan": (1.0, {"a": float("nan")}), "text": (1.0, "a"), "good": (1, {"a": 2})}[completion]


def voter(completion: str, example: dict) -> tuple[float, dict]:
    return 1.0, {"answer": completion[0]}


def brevity(prompts: list, completions: list, answer: list[str], **kwargs: list) -> list[float | None]:
    """As TRL's documentation shows them: lists by name, and None where the reward does not apply."""
    assert [*map(len, (prompts, kwargs["base"]))] == [len(completions)] * 2
    return [None if expected == "" else float(len(text)) for text, expected in zip(completions, answer, strict=True)]


async def said(completions: list[list[dict]], **kwargs: list) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(messages[0]["content"])) for messages in completions]


def scaled(completions: list, prompts: list, factor: float = 2.0) -> list[float]:
    return [factor * len(text) for text in completions]
