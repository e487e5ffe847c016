"""Agents and samplers by script: an agent asks in texts, and a sampler writes given turns, letter by letter, so that
decoding and encoding them gives other tokens."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from automodel_rl.chat_api import chat_completions
from automodel_rl.data.messages import Chat
from automodel_rl.data.template import ChatTemplate
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.protocol import Completion
from automodel_rl.rollout.agents.codecs import ChatCodecs
from automodel_rl.rollout.agents.episode import AgentEpisode, AgentLimits, identity_of
from automodel_rl.rollout.agents.protocol import AgentResult
from tests.unit.data.stock_templates import stock_tokenizer

WORDS = "It is seven. Yes. Look up Ben, or Ada? Seven coins it is. Ask. How many coins? Sure? hello once upon a time"

LOOK_UP = {
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

LIMITS = AgentLimits(turns=32, sequence_tokens=4000, turn_tokens=400, seconds=60.0, staleness=0)

Message = dict[str, Any]
Ask = Callable[..., Awaitable[Message]]
CaseAgent = Callable[[Ask], Awaitable[None]]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(content: str = "", *who: str, thought: str = "") -> Message:
    """A turn that the sampler writes, with calls of `look_up`."""
    calls = [
        {"type": "function", "id": f"x{place:08d}", "function": {"name": "look_up", "arguments": {"who": one, "n": 2}}}
        for place, one in enumerate(who)
    ]
    thoughts = {"reasoning_content": thought, "thinking": thought} if thought else {}
    return {"role": "assistant", "content": content, **thoughts, **({"tool_calls": calls} if calls else {})}


class Script:
    """A sampler that writes given turns as a published template would.

    Attributes:
        written: what it wrote: of each turn the request and the completion.
    """

    def __init__(self, name: str, turns: Sequence[Message | str]):
        self.template = ChatTemplate(stock_tokenizer(name, WORDS))
        self.tokenizer = self.template.tokenizer
        self.codecs = ChatCodecs(self.template)
        self.turns = iter(turns)
        self.written: list[tuple[Request, Completion]] = []

    def write(self, request: Request) -> Completion:
        turn = next(self.turns)
        is_truncated = isinstance(turn, str)  # a text that is cut off
        ids = self._letters(turn) if isinstance(turn, str) else self._turn(turn, request)
        for place in range(len(ids)):  # a generator ends a turn at its stop texts
            if any(stop in self.tokenizer.decode(ids[: place + 1]) for stop in request.sampling.stop):
                ids = ids[: place + 1]
                break
        logprobs = [-0.25 - place / 64 - len(self.written) for place in range(len(ids))]
        completion = Completion(ids, logprobs, "length" if is_truncated else "stop", versions=(1, 1), num_cached=0)
        self.written.append((request, completion))
        return completion

    def _turn(self, turn: Message, request: Request) -> list[int]:
        tools = (LOOK_UP,) if turn.get("tool_calls") else ()
        opening = self.template.text_with_generation_prompt(Chat([user("Ask.")], tools))
        text = self.template.text(Chat([user("Ask."), turn], tools)) or ""
        header = self.template.header
        whole = text[len(opening) :] if text.startswith(opening) else text[text.rindex(header) + len(header) :]
        before = self.tokenizer.decode(request.prompt)
        begun = before[before.rindex(header) + len(header) :]  # a thought that the prompt has begun
        whole = whole.removeprefix(begun) if begun.strip() and whole.startswith(begun) else whole
        ids = self._letters(whole)
        ends = [place for place, token in enumerate(ids) if token in self.codecs.stop_ids]
        if ends:
            return ids[: ends[-1] + 1]
        mark = "<|observation|>" if turn.get("tool_calls") else "<|user|>"  # GLM's turns end with what comes next
        return [*ids, self.tokenizer.convert_tokens_to_ids(mark)]

    def _letters(self, text: str) -> list[int]:
        marks = sorted(map(re.escape, self.template.special_tokens), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(marks)})", text)
        return [
            token
            for piece in pieces
            for letter in ([piece] if piece in self.template.special_tokens else piece)
            for token in self.tokenizer(letter, add_special_tokens=False)["input_ids"]
        ]


def run_case(script: Script, agent: CaseAgent, limits: AgentLimits = LIMITS) -> AgentEpisode:
    """An agent's episode from its start to its end. Only JSON passes between agent and episode."""
    request = Request([], 5, Sampling(400), conversation=3)
    episode = AgentEpisode(request, {}, 0, script.codecs, limits, lambda: 1)

    async def ask(messages: list[Message], retry: int = 0, told: bool = True, **more: Any) -> Message:
        raw = json.dumps({"model": "any", "messages": messages, **more}).encode()
        call = chat_completions.read(json.loads(raw))
        answer = await episode.answer(call, identity_of("chat", raw), is_retry=bool(retry))
        if told:
            episode.mark_received(answer)
        reply = json.loads(json.dumps(chat_completions.reply([answer])))
        return reply["choices"][0]["message"]

    async def run() -> None:
        events: SimpleQueue[Any] = SimpleQueue()
        episode.attach(events)

        async def generate() -> None:
            while True:
                try:
                    asked = events.get_nowait()
                except Empty:
                    await asyncio.sleep(0)
                    continue
                waiting = episode.waiting[asked.number]
                waiting.give(script.write(waiting.request))

        generator = asyncio.ensure_future(generate())
        await agent(ask)
        generator.cancel()
        episode.begin()
        episode.finish(AgentResult(1.0), None)

    asyncio.run(run())
    return episode
