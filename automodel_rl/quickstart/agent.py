"""The demo's agent: asks the model for a product, evaluates its calculator calls, and gives a hint where it guessed.

Any program can take its place: it only has to call the model at `endpoint.base_url` with `endpoint.key`.
"""

import json
from typing import Any

from openai import OpenAI

from automodel_rl.quickstart.calculator import SCHEMA, TOOL_HINT, calculator
from automodel_rl.quickstart.problems import final_number
from automodel_rl.rollout.agents.protocol import AgentEndpoint

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="that of an episode")  # takes 60 ms, so once for all processes


def solve(endpoint: AgentEndpoint, example: dict[str, Any]) -> dict[str, float]:
    """Returns a reward of 1 for a correct answer, 0.5 if it took a hint. `example` is a prompt with its messages and
    answer."""
    complete: Any = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.key).chat.completions.create
    question = example["messages"][-1]["content"]
    for worth, hint in ((1.0, ""), (0.5, TOOL_HINT)):
        messages = [{"role": "user", "content": question + hint}]
        turn = complete(model=endpoint.model, messages=messages, tools=[SCHEMA]).choices[0].message
        if turn.tool_calls:
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": _result(call.function.arguments)}
                for call in turn.tool_calls
            ]
            messages = [*messages, turn, *results]
            answer = complete(model=endpoint.model, messages=messages, tools=[SCHEMA]).choices[0].message.content
            return {"reward": worth * (final_number(answer or "") == example["answer"]), "hinted": float(bool(hint))}
    return {"reward": 0.0, "hinted": 1.0}


def _result(arguments: str) -> str:
    try:
        return calculator(**json.loads(arguments))
    except Exception as error:  # shown to the model
        return f"error: {error}"
