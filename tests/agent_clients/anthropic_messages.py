"""Anthropic's client: messages with thoughts, every second one streamed, and a count of tokens."""

from typing import Any

import anthropic

SCHEMA = {
    "type": "object",
    "properties": {"who": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["who", "n"],
}
TOOLS: Any = [{"name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}]

client = anthropic.Anthropic()
messages: list[Any] = [{"role": "user", "content": "Ask."}]
assert client.messages.count_tokens(model="policy", messages=messages, tools=TOOLS, system="Be brief.").input_tokens > 5
for number in range(4):
    asked: Any = {"model": "policy", "max_tokens": 200, "system": "Be brief.", "messages": messages, "tools": TOOLS}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if number % 2:
        with client.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**asked)
    messages.append({"role": "assistant", "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        print("done", answer.stop_reason)
        break
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "7"} for call in calls]
    messages.append({"role": "user", "content": results})
