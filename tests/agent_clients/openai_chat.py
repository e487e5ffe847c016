"""OpenAI's client: chat completions with calls, then streamed."""

from typing import Any

from openai import OpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks up.",
            "parameters": {
                "type": "object",
                "properties": {"who": {"type": "string"}, "n": {"type": "integer"}},
                "required": ["who", "n"],
            },
        },
    }
]

client, messages = OpenAI(), [{"role": "user", "content": "Ask."}]  # type: tuple[OpenAI, list[Any]]
while True:
    turn = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
    messages.append(turn)
    if not turn.tool_calls:
        break
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in turn.tool_calls]
messages.append({"role": "user", "content": "Sure?"})
sent = [message if isinstance(message, dict) else message.model_dump() for message in messages]
with client.chat.completions.stream(model="policy", messages=sent, tools=TOOLS) as stream:
    print("done", stream.get_final_completion().choices[0].message.content)
