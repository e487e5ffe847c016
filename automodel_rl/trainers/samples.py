"""Greedy completions through the trained layout itself: no second copy of the model, any size, no cache."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import TokenSequence, pack_row
from automodel_rl.engine import Engine
from automodel_rl.observe.report import Sample


def greedy_samples(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[tuple[list[int], str]], max_new_tokens: int
) -> list[Sample]:
    """What the model writes, for the report. A collective; equal on every rank.

    Args:
        engine: of the model.
        tokenizer: of the model.
        prompts: token ids of every prompt, and what the data has in the completion's place.
        max_new_tokens: longest completion.
    """
    completions = greedy_completions(engine, [ids for ids, _ in prompts], max_new_tokens, {tokenizer.eos_token_id})
    return [
        Sample(tokenizer.decode(ids), tokenizer.decode(completion), expected)
        for (ids, expected), completion in zip(prompts, completions, strict=True)
    ]


def greedy_completions(
    engine: Engine, prompts: Sequence[list[int]], max_new_tokens: int, stop_ids: set[int]
) -> list[list[int]]:
    """The likeliest continuation of each prompt, token by token. A collective; equal on every rank.

    Each token costs a forward over all prompts, so this is for a few samples.

    Args:
        engine: of the model.
        prompts: token ids of every prompt.
        max_new_tokens: longest completion.
        stop_ids: tokens that end a completion; they are not part of it.
    """
    texts = [list(prompt) for prompt in prompts]
    running = list(range(len(texts)))
    for _ in range(max_new_tokens):
        if not running:
            break
        row = pack_row([_as_sequence(texts[i]) for i in running])
        chosen = dict(zip(running, engine.next_tokens([row]).tolist(), strict=True))
        running = [i for i in running if chosen[i] not in stop_ids]
        for i in running:
            texts[i].append(chosen[i])
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _as_sequence(ids: list[int]) -> TokenSequence:
    return TokenSequence(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.bool))
