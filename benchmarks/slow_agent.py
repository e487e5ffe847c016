"""An agent of six turns that takes its time between them. It imports no more than its client, as agents do."""

import asyncio
from typing import Any

from openai import AsyncOpenAI

TURNS = 6


async def solve(endpoint: Any, example: dict) -> float:
    """An agent that takes its time between turns."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    messages: list[Any] = [{"role": "user", "content": f"Task {example['number']}."}]

    async def turn(history: list[Any]) -> list[Any]:
        found = await client.chat.completions.create(model="policy", messages=history)
        await asyncio.sleep(example["seconds"])
        return [*history, found.choices[0].message, {"role": "user", "content": "more"}]

    messages = first = await turn(messages)
    for _ in range(TURNS - 1):
        messages = await turn(messages)
    if example["number"] % 8 == 0:
        await turn([*first[:-1], {"role": "user", "content": "other"}])
    return 1.0
