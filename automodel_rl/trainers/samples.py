"""Greedy completions by the trained layout itself: for models of any size, without a second copy or a KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import TokenSequence, single_media_tokens
from automodel_rl.observe.console import SlowWork
from automodel_rl.policy.policy import Policy


@dataclass(frozen=True)
class Sample:
    """A held-out prompt, the model's completion, and the reference completion in the data."""

    prompt: str
    completion: str
    expected: str


def greedy_samples(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[TokenSequence, str]],
    max_new_tokens: int,
    stop_ids: set[int],
    say: Callable[[str], None],
) -> list[Sample]:
    """Generates sample completions for the report.

    Args:
        prompts: prompts, each with the completion in the data.
        stop_ids: tokens that end a completion, not included in it.
        say: prints progress where generation is slow.
    """
    work = SlowWork(say, f"writing {len(prompts)} samples for the report", f"at most {max_new_tokens} tokens")
    completions = greedy_completions(policy, [prompt for prompt, _ in prompts], max_new_tokens, stop_ids, work.note)
    return [
        Sample(_shown(tokenizer, prompt), tokenizer.decode(completion), expected)
        for (prompt, expected), completion in zip(prompts, completions, strict=True)
    ]


def _shown(tokenizer: PreTrainedTokenizerBase, prompt: TokenSequence) -> str:
    return str(tokenizer.decode(single_media_tokens(prompt.input_ids.tolist(), prompt.media)))


def greedy_completions(
    policy: Policy,
    prompts: Sequence[TokenSequence],
    max_new_tokens: int,
    stop_ids: set[int],
    note: Callable[[int], None],
) -> list[list[int]]:
    """Returns the greedy continuation of each prompt.

    Each token costs a forward over all prompts, so this is for a few samples only.

    Args:
        stop_ids: tokens that end a completion, not included in it.
        note: called with the number of tokens so far after each one.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(texts)))
    for done in range(max_new_tokens):
        if not running:
            break
        chosen = dict(
            zip(running, policy.next_tokens([_continued(prompts[i], texts[i]) for i in running]), strict=True)
        )
        running = [i for i in running if chosen[i] not in stop_ids]
        for i in running:
            texts[i].append(chosen[i])
        note(done + 1)
    return texts


def _continued(prompt: TokenSequence, text: list[int]) -> TokenSequence:
    ids = torch.cat([prompt.input_ids, torch.tensor(text, dtype=torch.int64)])
    return TokenSequence(ids, torch.zeros(len(ids), dtype=torch.bool), media=prompt.media)
