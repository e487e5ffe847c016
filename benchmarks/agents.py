"""Agents through the endpoint with vLLM: how busy it is, what is context again, and the same by an environment.

    cd benchmarks
    python agents.py --vllm-python PYTHON
    python agents.py --tiny               check the script on a CPU, with a stand-in for the generator

A dense 1.5B model with random weights (W1). Agents by OpenAI's client, each in a process of its own, ask for six turns
of about 128 tokens (a token of 1 in 128 ends a turn), answer with 64 tokens after 50 ms, and every eighth goes on from
its first turn in a second way. Prints a line for agents, and one for an environment that answers so in processes.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conversations
import torch
from conversations import ANSWER_TOKENS, PROMPT_TOKENS, TURN_TOKENS, Codec, Watched
from slow_agent import TURNS
from workload import TINY, WORKLOADS, write_model

from automodel_rl.config.rollout import RolloutConfig
from automodel_rl.data.template import ChatTemplate
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.protocol import RankGenerator, results
from automodel_rl.quickstart.model import train_tokenizer
from automodel_rl.rollout.agents.agents import Agents
from automodel_rl.rollout.episodes.environment_pool import EnvironmentPool
from automodel_rl.rollout.episodes.environment_server import Setup
from automodel_rl.rollout.episodes.protocol import Message, Turn


class AgentCodec(Codec):
    """Prompts and answers of random tokens, and texts that tell turns apart."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return torch.randint(self.vocab_size, (PROMPT_TOKENS,)).tolist()

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Turn:
        text = f"turn {hash(tuple(token_ids))}"
        return Turn(text, text)

    def of(self, tools: Sequence[dict[str, Any]]) -> tuple[str, "AgentCodec"]:
        return "", self


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python")
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=0.05, help="between two turns")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    conversations.TURNS = TURNS
    folder = Path(tempfile.gettempdir()) / f"automodel_rl_conversations{'_tiny' if options.tiny else ''}"
    if not (folder / "config.json").is_file():
        write_model(folder, WORKLOADS["W1"] | (TINY if options.tiny else {}))
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    generator = (
        conversations._tiny_generator(folder)
        if options.tiny
        else conversations._vllm(folder, options.vllm_python, vocab_size)
    )
    pool = EnvironmentPool(
        Setup("conversations:Slow", (), 30.0, "auto", str(folder / "environments.log")), ends_on_bad_call=False
    )
    agents = make_agents(folder, vocab_size, options.conversations)
    try:
        for repetition in range(options.rounds):
            print(json.dumps(measure(repetition, generator, agents, options)), flush=True)
            found = conversations.measure(Watched, repetition, generator, pool, vocab_size, options)
            print(json.dumps({**found, "driven": "by an environment"}), flush=True)
    finally:
        agents.close()
        generator.close()
        pool.close()


def make_agents(folder: Path, vocab_size: int, count: int) -> Agents:
    rollout = RolloutConfig(prompts=2, agent="slow_agent:solve", max_turns=2 * TURNS, max_episodes=count)
    length = PROMPT_TOKENS + TURNS * (TURN_TOKENS + ANSWER_TOKENS)
    rollout = rollout.model_copy(update={"max_new_tokens": TURN_TOKENS})
    config: Any = SimpleNamespace(seed=0, rollout=rollout, world_size=1, longest_sequence=length)
    template = ChatTemplate(train_tokenizer(["a text"], vocab_size=300))
    agents = Agents(config, template, folder, lambda: 0, needs_reward=True)
    agents.codecs = AgentCodec(vocab_size)  # type: ignore[assignment]
    return agents


def measure(
    repetition: int, generator: RankGenerator, agents: Agents, options: argparse.Namespace
) -> dict[str, float | str]:
    watched = Watched(generator)
    episodes = []
    for number in range(options.conversations):
        example = {"number": number, "seconds": options.seconds}
        prompt: Any = SimpleNamespace(media=(), example=example, messages=[], number=number)
        request = Request([], 1000 * repetition + number, Sampling(TURN_TOKENS), conversation=number)
        episodes.append(agents.episode(prompt, request))
    began = time.perf_counter()
    completions = results(agents.submit(watched, episodes))
    seconds = time.perf_counter() - began
    rows = [branch for completion in completions for branch in completion.branches([])]
    metrics = [one.conversation.metrics for one in completions if one.conversation is not None]
    again = sum(values["context_again"] for values in metrics)
    return {
        "driven": "by agents",
        "seconds": round(seconds, 2),
        "busy": round(watched.busy / seconds, 3),
        "in_flight": round(watched.request_seconds / seconds, 1),
        "turns": watched.turns,
        "rows": len(rows),
        "sampled_tokens_per_second": round(sum(sum(row.sampled) for row in rows) / seconds),
        "cached": round(watched.cached / max(1, watched.asked), 3),
        "context_again": round(again / sum(len(row.prompt) + len(row.token_ids) for row in rows), 3),
        "errors": sum(completion.finish == "error" for completion in completions),
    }


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    main()
