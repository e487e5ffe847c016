"""Groups: prompts with their rewarded completions, and the metrics and records of a step."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import single_media_tokens
from automodel_rl.config import FilterConfig
from automodel_rl.data.media import part_type
from automodel_rl.data.messages import MEDIA_PARTS
from automodel_rl.errors import InputError
from automodel_rl.generators.protocol import Conversation
from automodel_rl.losses.advantages import has_signal, overlong_penalty
from automodel_rl.rollout.agents.metrics import agent_metrics
from automodel_rl.rollout.episodes.episode import (
    ASKED,
    CACHED,
    CALLS,
    ENVIRONMENT_ERRORS,
    MALFORMED,
    SECONDS,
    TURNS,
)
from automodel_rl.rollout.episodes.tools import FAILED, TIMED_OUT
from automodel_rl.rollout.protocol import Promptlike, Rollout
from automodel_rl.rollout.rewards.counts import error_rates, metric_means
from automodel_rl.rollout.rewards.scorer import Score

CALL_METRICS = (FAILED, TIMED_OUT)


def conversation_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Returns metrics of conversations, under `rollout/`.

    Means over conversations: turns, calls, seconds in environments, the environment's reward, tokens that were not
    sampled, and environments' own metrics. Shares: malformed calls per turn; failed and late calls per call;
    conversations that a limit ended; cached tokens of the prompts after the first turn. Count: conversations whose
    environment failed.
    """
    if not conversations:
        return {}
    count = len(conversations)
    sums = defaultdict[str, float](float)
    for conversation in conversations:
        for name, value in conversation.metrics.items():
            sums[name] += value
    turns, calls = max(1.0, sums[TURNS]), max(1.0, sums[CALLS])
    limited = sum(c.end not in ("done", "error") for c in conversations)
    own = (TURNS, CALLS, MALFORMED, SECONDS, ENVIRONMENT_ERRORS, CACHED, ASKED, *CALL_METRICS)
    return {
        **({"rollout/cached_tokens": sums[CACHED] / sums[ASKED]} if sums[ASKED] else {}),
        "rollout/turns_mean": sums[TURNS] / count,
        "rollout/calls_mean": sums[CALLS] / count,
        "rollout/malformed_calls": sums[MALFORMED] / turns,
        **{f"rollout/{name}": sums[name] / calls for name in CALL_METRICS},
        "rollout/environment_seconds_mean": sums[SECONDS] / count,
        "rollout/environment_reward_mean": sum(c.reward for c in conversations) / count,
        "rollout/environment_errors": sums[ENVIRONMENT_ERRORS],
        "rollout/observed_tokens_mean": sum(c.sampled.count(False) for c in conversations) / count,
        "rollout/ended_by_limit": limited / count,
        **{f"rollout/environment_{name}": sums[name] / count for name in sorted(sums) if name not in own},
    }


@dataclass(frozen=True)
class Group:
    """A prompt and its G completions.

    Attributes:
        rewards: of `shaped_rewards`, float64 [G]; nan where there is none.
        excludes_truncated: exclude truncated completions from baseline and training.
        weights: of rewards that are normalised separately; empty if their sum is.
    """

    prompt: Promptlike
    rollouts: list[Rollout]
    rewards: Tensor
    excludes_truncated: bool = False
    weights: tuple[float, ...] = ()

    @property
    def scored(self) -> "Group":
        """The group without completions that failed, or that a failed reward excludes."""
        rollouts = [rollout for rollout in self.rollouts if rollout.is_rewarded]
        return dataclasses.replace(self, rollouts=rollouts, rewards=self.rewards[~self.rewards.isnan()])

    @property
    def compared(self) -> "Group":
        """`scored`, without truncated completions if `excludes_truncated`: those that are compared and trained."""
        scored = self.scored
        if not self.excludes_truncated:
            return scored
        is_kept = torch.tensor([rollout.completion.finish != "length" for rollout in scored.rollouts], dtype=torch.bool)
        kept = [rollout for rollout, stays in zip(scored.rollouts, is_kept.tolist(), strict=True) if stays]
        return dataclasses.replace(scored, rollouts=kept, rewards=scored.rewards[is_kept])

    @property
    def parts(self) -> Tensor:
        """Score of each reward for each completion, float64 [G, R]; 0 for a failed call that does not count."""
        parts = [rollout.score.parts for rollout in self.rollouts]
        return torch.tensor(parts, dtype=torch.float64).nan_to_num()

    @property
    def unshaped(self) -> "Group":
        """The group with the task's rewards, without scale and length penalty."""
        return dataclasses.replace(self, rewards=_rewards(self.rollouts))

    @property
    def is_comparable(self) -> bool:
        return len(self.compared.rollouts) > 1

    @property
    def has_signal(self) -> bool:
        """Whether the task's rewards differ: their sum or, if they are normalised separately, any with a weight. The
        length penalty does not count."""
        compared = self.compared
        if not self.is_comparable:
            return False
        if self.weights:
            return bool(has_signal(compared.parts.T[torch.tensor(self.weights) != 0]).any())
        return bool(has_signal(compared.unshaped.rewards[None]))


def shaped_rewards(rollouts: Sequence[Rollout], config: FilterConfig, max_new_tokens: int) -> Tensor:
    """Returns the scaled total scores minus the penalty for overlong completions: float64 [G], nan for excluded
    ones."""
    rewards = _rewards(rollouts) * config.reward_scale
    if not config.overlong_buffer:
        return rewards
    lengths = torch.tensor([len(rollout.completion.last_turn) for rollout in rollouts])
    return rewards - config.overlong_penalty * overlong_penalty(lengths, max_new_tokens, config.overlong_buffer)


def _rewards(rollouts: Sequence[Rollout]) -> Tensor:
    totals = [rollout.score.total if rollout.is_rewarded else math.nan for rollout in rollouts]
    return torch.tensor(totals, dtype=torch.float64)


def all_scores(groups: Sequence[Group]) -> list[Score]:
    return [rollout.score for group in groups for rollout in group.rollouts]


def first_error(rollouts: Iterable[Rollout]) -> str:
    errors = [(r.completion.error, *r.score.errors) for r in rollouts]
    return next((text for of_one in zip(*errors, strict=True) for text in of_one if text), "")


def pass_rates(groups: Sequence[Sequence[Score]], index: int, passes_at: float) -> dict[str, float]:
    """Returns rates of passing completions. A failed call of the reward does not pass.

    Args:
        groups: scores of each prompt's completions.
        index: index of the deciding reward in the config.
        passes_at: lowest score that passes.

    Returns:
        pass@1 for single completions. For k completions per prompt: mean@k, the share of completions that pass;
        pass@k, the share of prompts with one that passes; and, if the reward reports answers, maj@k, the share of
        prompts whose most frequent answer passes. Ties go to the first answer.
    """
    count = max(len(scores) for scores in groups)
    passes = [[not s.errors[index] and s.parts[index] >= passes_at for s in scores] for scores in groups]
    mean = sum(map(sum, passes)) / sum(map(len, passes))
    if count == 1:
        return {"pass@1": mean}
    rates = {f"mean@{count}": mean, f"pass@{count}": sum(map(any, passes)) / len(passes)}
    answers = [[score.answers[index] if score.answers else None for score in scores] for scores in groups]
    if any(answer is not None for of_prompt in answers for answer in of_prompt):
        votes = [_most_frequent_passes(*pair) for pair in zip(answers, passes, strict=True)]
        rates[f"maj@{count}"] = sum(votes) / len(votes)
    return rates


def _most_frequent_passes(answers: Sequence[str | None], passes: Sequence[bool]) -> bool:
    counts = Counter(answer for answer in answers if answer is not None)
    return bool(counts) and passes[answers.index(counts.most_common(1)[0][0])]


def rollout_metrics(groups: Sequence[Group], rewards: Sequence[str], policy_version: int) -> dict[str, float]:
    """Returns the metrics of a step's rollouts, given all groups, the names of rewards, and the version about to be
    trained.

    Raises:
        InputError: every call of a reward failed.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    errors = [error for rollout in rollouts for error in rollout.score.errors if error]
    if rewards and len(errors) == len(rollouts) * len(rewards):
        raise InputError(f"every call of a reward failed in this step, the first: rewards.function={errors[0]}")
    totals = torch.cat([group.scored.rewards for group in groups])
    parts = zip(*(rollout.score.parts for rollout in rollouts), strict=True)
    scored = {name: [s for s in scores if not math.isnan(s)] for name, scores in zip(rewards, parts, strict=True)}
    branches = [branch for group in groups for rollout in group.rollouts for branch in rollout.branches(group.prompt)]
    sampled = sum(sum(branch.sampled) for branch in branches)
    ages = [policy_version - r.completion.versions[0] for r in rollouts if r.completion.versions is not None]
    return {
        **({"rollout/staleness_mean": sum(ages) / len(ages), "rollout/staleness_max": max(ages)} if ages else {}),
        "rollout/reward_mean": totals.mean().item(),
        "rollout/reward_std": totals.std().nan_to_num().item(),
        "rollout/completion_tokens_mean": sum(len(branch.token_ids) for branch in branches) / len(rollouts),
        "rollout/truncated": sum(r.completion.finish == "length" for r in rollouts) / len(rollouts),
        "rollout/failed": sum(r.has_failed for r in rollouts),
        "rollout/reward_errors": len(errors),
        "rollout/left_out": sum(r.score.is_excluded for r in rollouts),
        "rollout/invalid_logprobs": sampled - sum(sum(branch.trained) for branch in branches),
        "rollout/groups_without_signal": sum(not group.has_signal for group in groups),
        "rollout/num_groups": len(groups),
        **{f"rollout/reward_{name}": sum(scores) / len(scores) for name, scores in scored.items() if scores},
        **{f"rollout/error_rate_{name}": rate for name, rate in error_rates(all_scores(groups), rewards).items()},
        **{f"rollout/{name}": mean for name, mean in metric_means(all_scores(groups), rewards).items()},
        **conversation_metrics([one for one in conversations_of(groups) if not one.is_agent_episode]),
        **agent_metrics([one for one in conversations_of(groups) if one.is_agent_episode]),
    }


def conversations_of(groups: Sequence[Group]) -> list[Conversation]:
    """Returns the conversations of groups. Single-turn completions have none."""
    found = [rollout.completion.conversation for group in groups for rollout in group.rollouts]
    return [conversation for conversation in found if conversation is not None]


def _conversation_record(conversation: Conversation | None) -> dict[str, Any]:
    if conversation is None:
        return {}
    branches = conversation.branches
    return {
        "messages": conversation.messages,
        "end": conversation.end,
        "sampled": sum(sampled.count(True) for sampled in (conversation.sampled, *(b.sampled for b in branches))),
        "turns": conversation.metrics,
        **({"tree": conversation.tree, "forks": conversation.forks} if conversation.is_agent_episode else {}),
    }


def _prompt_ids(prompt: Promptlike, rollout: Rollout) -> list[int]:
    """Returns the prompt for a record, with an environment's first messages. For agents, which may begin differently,
    it is the group's."""
    conversation = rollout.completion.conversation
    return prompt.token_ids if conversation is None or conversation.is_agent_episode else conversation.prompt


def _media_record(prompt: Promptlike) -> dict[str, Any]:
    """Returns paths of the prompt's media by column; without a file, the number of bytes."""
    found: dict[str, list[Any]] = {}
    for item in prompt.media:
        source = f"{len(item.source)} bytes" if isinstance(item.source, bytes) else item.source
        found.setdefault(MEDIA_PARTS[part_type(item)], []).append(source)
    return found


def _number_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def rollout_records(
    groups: Sequence[Group],
    rewards: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    details: Mapping[tuple[int, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Returns the records of a step's rollouts for the disk, one JSON object per completion, with `details` by key of
    the rollout."""
    return [
        {
            "prompt": tokenizer.decode(single_media_tokens(_prompt_ids(group.prompt, rollout), group.prompt.media)),
            **_media_record(group.prompt),
            "completion": rollout.text,
            "reward": _number_or_none(reward),
            "rewards": dict(zip(rewards, map(_number_or_none, rollout.score.parts), strict=True)),
            "metrics": metric_means([rollout.score], rewards),
            "errors": [error for error in (*rollout.score.errors, rollout.completion.error) if error],
            "tokens": len(rollout.completion.token_ids),
            "finish": rollout.completion.finish,
            **_conversation_record(rollout.completion.conversation),
            **details.get(rollout.key, {}),
        }
        for group in groups
        for rollout, reward in zip(group.rollouts, group.rewards.tolist(), strict=True)
    ]
