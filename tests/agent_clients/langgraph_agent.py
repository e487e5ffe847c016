"""langgraph by langchain's agent, streamed if there is an argument."""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def look_up(who: str, n: int) -> str:
    """Looks up."""
    return "7"


graph = create_agent(ChatOpenAI(model="policy", streaming=len(sys.argv) > 1), [look_up], system_prompt="Be brief.")
print("done", graph.invoke({"messages": [{"role": "user", "content": "Ask."}]})["messages"][-1].content)
