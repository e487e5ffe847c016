"""Tasks in a folder each, as Harbor and Terminal-Bench have them: `instruction.md`, what is in `environment/`, and
`tests/test.sh`, which ends with 0 or writes a reward into `$REWARD_FILE`.

Commands run on this machine, in a copy of the folder, with your rights: start the run in a container. A record has a
`prompt` and `task`, the folder.
"""

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from automodel_rl.rollout.agents.protocol import AgentEndpoint

MAX_COMMANDS = 16
SECONDS = 60.0
MAX_CHARACTERS = 4000
BASH: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in the task's folder.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


async def run(command: list[str], folder: Path, **variables: str) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env={**os.environ, **variables}
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    except TimeoutError:
        process.kill()
        return 124, f"took longer than {SECONDS:g} s"
    return process.returncode or 0, printed.decode(errors="replace")[-MAX_CHARACTERS:]


async def solve(endpoint: AgentEndpoint, example: dict[str, Any]) -> dict[str, float]:
    """Returns what the task's tests say."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    task = Path(example["task"])
    with tempfile.TemporaryDirectory() as place:
        folder, reward = Path(place) / "app", Path(place) / "reward.txt"
        shutil.copytree(task / "environment", folder)
        messages: list[Any] = [{"role": "user", "content": (task / "instruction.md").read_text()}]
        num_commands = 0
        while num_commands < MAX_COMMANDS:
            found = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[BASH])
            turn = found.choices[0].message
            messages.append(turn)
            if not turn.tool_calls:
                break
            for call in turn.tool_calls:
                command = json.loads(call.function.arguments).get("command", "")
                code, printed = await run(["bash", "-c", str(command)], folder)
                num_commands += 1
                told = f"exit code {code}\n{printed}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
        code, _ = await run(["bash", str((task / "tests" / "test.sh").absolute())], folder, REWARD_FILE=str(reward))
        score = float(reward.read_text()) if reward.exists() else float(code == 0)
    return {"reward": score, "commands": num_commands}
