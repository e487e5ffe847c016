"""smolagents' ToolCallingAgent, which sends calls back as texts."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def look_up(who: str, n: int) -> str:
    """Looks up.

    Args:
        who: who.
        n: n.
    """
    return "7"


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print("done", ToolCallingAgent(tools=[look_up], model=model, max_steps=4).run("Ask."))
