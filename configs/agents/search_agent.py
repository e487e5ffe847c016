"""An agent of openai-agents that answers questions by searching a record's documents. The run only tells it where the
model is: any agent of that package is trained as it is.

Needs `pip install openai-agents`. A record has a `prompt`, an `answer` and `documents`, a list of texts.
"""

import re
from typing import Any

from agents import Agent, Runner, function_tool, set_tracing_disabled

from automodel_rl.rollout.agents.protocol import AgentEndpoint

MAX_FOUND = 3
INSTRUCTIONS = "Answer the question by a few words. Search the documents first."

set_tracing_disabled(True)


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


async def solve(endpoint: AgentEndpoint, example: dict[str, Any]) -> dict[str, float]:
    """Returns 1 for an answer with all words of the right one."""
    documents, num_searches = example["documents"], 0

    @function_tool
    def search(query: str) -> str:
        """Searches documents.

        Args:
            query: Words to look for.
        """
        nonlocal num_searches
        num_searches += 1
        shared = [(len(words(query) & words(text)), text) for text in documents]
        found = [text for count, text in sorted(shared, key=lambda pair: -pair[0])[:MAX_FOUND] if count]
        return "\n\n".join(found) or "nothing"

    agent = Agent(name="searcher", instructions=INSTRUCTIONS, tools=[search], model=endpoint.model)
    question = example["messages"][-1]["content"]
    answer = (await Runner.run(agent, question, max_turns=8)).final_output
    return {"reward": float(words(str(example["answer"])) <= words(str(answer))), "searches": num_searches}
