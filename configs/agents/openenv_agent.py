"""An agent that plays an environment of OpenEnv whose actions are MCP tools. The model calls them until the environment
or the model ends the episode.

Needs `pip install openenv`, and a server of the environment. A record has a `prompt`, the server's `url`, and perhaps
`reset`, what the environment is reset with.
"""

import json
from typing import Any

from openai import AsyncOpenAI
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.mcp_client import MCPToolClient

from automodel_rl.rollout.agents.protocol import AgentEndpoint

MAX_TURNS = 16


async def solve(endpoint: AgentEndpoint, example: dict[str, Any]) -> dict[str, float]:
    """Returns the sum of the rewards of all steps."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key)
    messages: list[Any] = [*example["messages"]]
    total, steps, is_done = 0.0, 0, False
    async with MCPToolClient(base_url=example["url"]) as environment:
        await environment.reset(seed=endpoint.seed, **example.get("reset", {}))
        tools: list[Any] = [schema(tool) for tool in await environment.list_tools()]
        for _ in range(MAX_TURNS):
            found = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)
            turn = found.choices[0].message
            messages.append(turn)
            for call in turn.tool_calls or ():
                content, reward, is_done = await step(environment, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                total, steps = total + reward, steps + 1
                if is_done:
                    break
            if is_done or not turn.tool_calls:
                break
    return {"reward": total, "steps": steps}


def schema(tool: Any) -> dict[str, Any]:
    """A tool as chat completions have it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


async def step(environment: MCPToolClient, name: str, arguments: str) -> tuple[str, float, bool]:
    """Calls a tool. Returns what the model reads, the reward, and whether the episode is over."""
    try:
        action = CallToolAction(tool_name=name, arguments=json.loads(arguments))
    except ValueError as error:  # the model reads what was wrong
        return f"error: {error}", 0.0, False
    result = await environment.step(action)
    observation = result.observation
    if observation.error is not None:
        return f"error: {observation.error.message}", result.reward or 0.0, result.done
    content = observation.result
    if isinstance(content, dict) and "data" in content:  # FastMCP's result, of which this is the value
        content = content["data"]
    return content if isinstance(content, str) else json.dumps(content), result.reward or 0.0, result.done
