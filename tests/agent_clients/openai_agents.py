"""openai-agents: chat completions or responses (the first argument), streamed if there is a second one."""

import asyncio
import sys
from typing import Any

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
api: Any = sys.argv[1]
set_default_openai_api(api)


@function_tool
def look_up(who: str, n: int) -> str:
    """Looks up."""
    return "7"


async def main() -> None:
    agent = Agent(name="A", instructions="Be brief.", tools=[look_up], model="policy")
    if len(sys.argv) > 2:
        run = Runner.run_streamed(agent, "Ask.")
        async for _ in run.stream_events():
            pass
        print("done", run.final_output)
    else:
        print("done", (await Runner.run(agent, "Ask.")).final_output)


asyncio.run(main())
