"""A coding agent: the model writes a function, sees what its tests print, and mends it. Code runs in the sandbox.

A record has a `prompt`, which asks for a function, and `tests`, a list of lines such as `assert double(3) == 6`.
"""

import re
from typing import Any

from openai import AsyncOpenAI

from automodel_rl.rollout.agents.protocol import AgentEndpoint
from automodel_rl.rollout.episodes.python_tool import run_python

MAX_ATTEMPTS = 3
SECONDS = 10.0
BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)

CHECK = """{code}
passed = 0
for test in {tests!r}:
    try:
        exec(test)
        passed += 1
    except Exception as error:
        print(f"{{test}}: {{type(error).__name__}} {{error}}")
print("passed", passed)
"""


async def solve(endpoint: AgentEndpoint, example: dict[str, Any]) -> dict[str, float]:
    """Returns the share of tests that the last attempt passes, less a tenth for each attempt after the first."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    messages: list[Any] = [dict(message) for message in example["messages"]]
    share, attempts = 0.0, 0
    while attempts < MAX_ATTEMPTS:
        attempts += 1
        found = await client.chat.completions.create(model=endpoint.model, messages=messages)
        text = found.choices[0].message.content or ""
        blocks = BLOCK.findall(text)
        printed = run_python(CHECK.format(code=blocks[-1] if blocks else "", tests=example["tests"]), SECONDS, True)
        counted = re.search(r"passed (\d+)\s*$", printed)
        share = int(counted[1]) / len(example["tests"]) if counted else 0.0
        if share == 1 or found.choices[0].finish_reason == "length":
            break
        told = f"The tests print:\n{printed[-1500:]}\nWrite the whole function again."
        messages += [found.choices[0].message, {"role": "user", "content": told}]
    return {"reward": share * (1 - 0.1 * (attempts - 1)), "attempts": attempts}
