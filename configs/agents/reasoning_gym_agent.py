"""Tasks of reasoning-gym, which makes and scores them.

Needs `pip install reasoning-gym`. Write prompts with

    python reasoning_gym_agent.py spell_backward chain_sum word_sorting > tasks.jsonl
"""

import functools
import json
import sys
from typing import Any

import reasoning_gym
from openai import AsyncOpenAI

from automodel_rl.rollout.agents.protocol import AgentEndpoint

SIZE = 1000
SYSTEM = "Think first. Put the answer alone on the last line."


@functools.cache
def dataset(name: str) -> Any:
    return reasoning_gym.create_dataset(name, size=SIZE, seed=0)


async def solve(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Returns the score that the task's data set gives the last line."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}]
    found = await client.chat.completions.create(model=endpoint.model, messages=messages)
    lines = (found.choices[0].message.content or "").strip().splitlines() or [""]
    data = dataset(example["dataset"])
    return float(data.score_answer(lines[-1].strip(), entry=data[example["number"]]))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for number, entry in enumerate(dataset(name)):
            known = {"question": entry["question"], "dataset": name, "number": number}
            print(json.dumps({"prompt": entry["question"], **known}))
