"""pydantic-ai: a run with calls, and another one that goes on with its history."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("policy"), instructions="Be brief.")


@agent.tool_plain
def look_up(who: str, n: int) -> str:
    """Looks up."""
    return "7"


first = agent.run_sync("Ask.")
print("done", agent.run_sync("Sure?", message_history=first.all_messages()).output)
