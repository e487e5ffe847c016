"""Log-probabilities of prompts by a policy: of their own tokens, of the likeliest ones, and of given ones."""

from collections.abc import Sequence

import numpy as np
import torch

from automodel_rl.batch import Batch, TokenSequence
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.sampled import PromptScores, SamplePrompt, ScoredTokens

IDS = "prompt_ids"


def score_prompts(policy: Policy, prompts: Sequence[SamplePrompt]) -> list[PromptScores]:
    """Computes what each prompt's `scoring` requests."""
    topped = [place for place, prompt in enumerate(prompts) if prompt.scoring.num_top]
    plain = [place for place, prompt in enumerate(prompts) if prompt.scoring.with_logprobs and place not in topped]
    named = [place for place, prompt in enumerate(prompts) if prompt.scoring.ids is not None]
    tops = dict(
        zip(
            topped,
            score_with_top(
                policy,
                [prompts[place].tokens for place in topped],
                [prompts[place].scoring.num_top for place in topped],
            ),
            strict=True,
        )
    )
    logprobs = dict(zip(plain, score(policy, [prompts[place].tokens for place in plain]), strict=True))
    logprobs |= {place: top.logprobs for place, top in tops.items() if prompts[place].scoring.with_logprobs}
    at = dict(zip(named, _score_named(policy, [prompts[place] for place in named]), strict=True))
    return [PromptScores(logprobs.get(place), tops.get(place), at.get(place)) for place in range(len(prompts))]


def score(policy: Policy, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns the log-probability of each token of each row, float32 [n], the first 0."""
    return [logprobs.float().numpy() for logprobs in policy.logprobs(_batch(rows))] if rows else []


def score_with_top(policy: Policy, rows: Sequence[Sequence[int]], num_top: Sequence[int]) -> list[ScoredTokens]:
    """Returns the log-probabilities of each row's tokens, and of its `num_top` likeliest ones, at most the
    vocabulary."""
    if not rows:
        return []
    batch = _batch(rows)
    tops = policy.top_logprobs(batch, min(max(num_top), policy.vocab_size))
    found = []
    for own, (values, ids), row, k in zip(policy.logprobs(batch), tops, rows, num_top, strict=True):
        values, ids, tokens = values[:, :k].float(), ids[:, :k], torch.tensor(row)
        # A token among the likeliest has the same value in both, so that they can be compared.
        is_own = ids == tokens[:, None]
        exact = torch.where(is_own, values, 0.0).sum(1)
        own = torch.where(is_own.any(1), exact, own.float())
        own[0] = 0.0
        found.append(ScoredTokens(own.numpy(), values.numpy(), ids.numpy()))
    return found


def next_tokens(policy: Policy, rows: Sequence[Sequence[int]]) -> list[int]:
    return policy.next_tokens(_batch(rows).sequences)


def _score_named(policy: Policy, prompts: Sequence[SamplePrompt]) -> list[np.ndarray]:
    if not prompts:
        return []
    asked = [prompt.scoring.ids for prompt in prompts]
    widths = [0 if ids is None else ids.shape[1] for ids in asked]
    batch = _batch([prompt.tokens for prompt in prompts])
    rows = []
    for prompt, ids in zip(prompts, asked, strict=True):
        row = torch.full((len(prompt.tokens), max(widths)), -1)
        if ids is not None:
            row[1:, : ids.shape[1]] = torch.from_numpy(ids)
        rows.append(row)
    batch[IDS] = rows
    found = policy.logprobs(batch, ids=IDS)
    return [values[1:, :width].float().numpy() for values, width in zip(found, widths, strict=True)]


def _batch(rows: Sequence[Sequence[int]]) -> Batch:
    return Batch(TokenSequence(torch.tensor(row), torch.ones(len(row), dtype=torch.bool)) for row in rows)
