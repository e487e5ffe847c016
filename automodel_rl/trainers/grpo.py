"""Reinforcement learning on prompts with rewards: rollouts, advantages, updates, and again."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import PackedBatch, TokenSequence, add_values
from automodel_rl.config import GRPOConfig
from automodel_rl.data.chat import ChatTokenizer, load_tokenizer
from automodel_rl.data.loader import PackedStep, pack_step
from automodel_rl.data.prompts import Prompt, PromptStream
from automodel_rl.engine import Engine
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.losses import LossFn, Readout, grpo_loss
from automodel_rl.losses.advantages import advantages, has_signal, overlong_penalty
from automodel_rl.losses.terms import kl_estimate
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.report import Sample
from automodel_rl.observe.rollouts import save_rollouts
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.rollout.collect import Rollout, RolloutCollector
from automodel_rl.rollout.engines import make_engine
from automodel_rl.rollout.scoring import Scorer
from automodel_rl.trainers.run import Run, Step, where

STEPS_WITHOUT_SIGNAL = 10
"""Steps in a row from which nothing can be learned, after which a run ends."""


class GRPOTrainer:
    """Trains a policy on rewards. Every rank of the job makes one and calls `train`.

    Args:
        config: the run.
        resume: go on from the newest checkpoint in the run directory, or start if there is none.

    Raises:
        InputError: something in the config, the data or the checkpoint is wrong. Nothing has been written.
    """

    def __init__(self, config: GRPOConfig, resume: bool = False):
        self.config = config
        directory = RunDirectory(config, config.output, resume)
        self.handle = ModelHandle.from_pretrained(config.model, config.parallel, config.memory)
        _check_context(config, self.handle)
        torch.manual_seed(config.seed + dist.get_rank())
        self.tokenizer = load_tokenizer(self.handle.source, config.data, self.handle.config.vocab_size)
        chat = ChatTokenizer(self.tokenizer, "last")
        seed = config.seed if config.data.shuffle else None
        self.prompts = PromptStream(config.data.train, chat, config.rollout.max_prompt_tokens, seed)
        self.prompts.check_fit()
        held_out = config.data.validation
        self.validation = (
            PromptStream(held_out, chat, config.rollout.max_prompt_tokens, None).every_prompt() if held_out else []
        )
        self.loss = _make_loss(config)
        self.readout = Readout(config.rollout.temperature, entropy=True)
        total_steps = config.length.steps or _steps_of_epochs(config, self.prompts)
        self.engine = Engine(self.handle, config.optimizer, total_steps * config.batch.updates)
        # Before a checkpoint takes the place of the weights that training started from.
        self.reference = ReferenceWeights(self.handle) if config.needs_reference else None
        self.run = Run(
            config,
            directory,
            self.engine,
            total_steps,
            lambda: {"prompts": self.prompts.state_dict()},
            best_metric="val/reward_mean",
            higher_is_better=True,
        )
        if resume and (state := self.run.resume()):
            self.prompts.load_state_dict(state["prompts"])
        self.rollouts = RolloutCollector(
            functools.partial(make_engine, config.rollout, self.handle, self.tokenizer),
            Scorer(config.rewards),
            self.handle,
            self.tokenizer,
            config.rollout,
            config.seed,
        )
        self.steps_without_signal = 0
        self.samples: list[Sample] = []

    def train(self) -> Path:
        """Runs to the end.

        Returns:
            The folder of the trained Hugging Face checkpoint.

        Raises:
            StoppedError: SIGTERM or Ctrl-C came; a checkpoint is saved.
            RolloutError: no completions could be had, or none that teach anything; a checkpoint is saved.
        """
        self.rollouts.load_weights()
        baseline = self._validate if self.validation and self.config.length.validate_every else None
        for step in self.run.steps(self._summary(), baseline):
            groups = self._collect(step)
            with step.time("pack"):
                updates = self._pack(groups)
            with step.time("logprobs"):
                rows = self._with_logprobs(updates)
            with step.time("advantages"):
                rows = self._with_advantages(groups, rows)
            with step.time("train"):
                outputs = [self.engine.train_step(batches, self.loss, self.readout) for batches in rows]
            with step.time("sync"):
                self.rollouts.load_weights()
            step.record(outputs)
            step.record_performance(_whole(updates), self.config.batch.row_tokens)
            self._warn(step)
            if self.validation and self.run.validates:
                with step.time("validate"):
                    step.row |= self._validate()
        self.rollouts.close()
        self.handle.save_pretrained(self.run.directory.final, self.tokenizer)
        return self.run.finish(f"GRPO of {self.config.model.path}", self.samples)

    def _summary(self) -> str:
        rollout = self.config.rollout
        return (
            f"{rollout.prompts} prompts x {rollout.group_size} completions a step, of "
            f"{sum(self.prompts.sampler.sizes):,} prompts, {where(self.config, self.handle)}"
        )

    # --- rollouts

    def _collect(self, step: Step) -> list["Group"]:
        """Rewarded completions of this step's prompts, and the metrics of them."""
        before = self.prompts.state_dict()
        try:
            with step.time("rollout"):
                generated, groups = self._generate()
            self._check_signal(groups)
            step.row |= _rollout_metrics(generated, self.config)
        except (RolloutError, InputError):
            self.prompts.load_state_dict(before)
            self.run.abandon_step()
            raise
        step.row["data/num_overlong_prompts"] = self.prompts.num_overlong
        if self.run.is_first_rank:
            save_rollouts(self.run.directory.rollouts / f"step_{self.run.step}.jsonl", self._records(generated))
        return groups

    def _generate(self) -> tuple[list["Group"], list["Group"]]:
        """All groups that were generated, and those to learn from."""
        config = self.config
        generated: list[Group] = []
        chosen: list[Group] = []
        for _ in range(1 + (config.filter.max_refills if config.filter.dynamic else 0)):
            prompts = self.prompts.take(config.rollout.prompts - len(chosen))
            rollouts = self.rollouts.collect(prompts, config.rollout.group_size, config.rollout.temperature)
            new = [Group(p, r, self._rewards(r)) for p, r in zip(prompts, rollouts, strict=True)]
            generated += new
            chosen += [group for group in new if group.is_whole and (group.has_signal or not config.filter.dynamic)]
            if len(chosen) == config.rollout.prompts:
                break
        if not chosen:  # groups without signal do no harm, and keep a step a step
            chosen = [group for group in generated if group.is_whole]
        if not chosen:
            error = next(r.completion.error for group in generated for r in group.rollouts if r.completion.error)
            raise RolloutError(f"every group has a completion that failed, the first with: {error}")
        return generated, chosen

    def _rewards(self, rollouts: list[Rollout]) -> Tensor:
        """Shaped rewards of a group, float64 [G]."""
        config = self.config
        rewards = torch.tensor([rollout.score.total for rollout in rollouts], dtype=torch.float64)
        rewards = rewards * config.filter.reward_scale
        if config.filter.overlong_buffer:
            lengths = torch.tensor([len(rollout.completion.token_ids) for rollout in rollouts])
            penalty = overlong_penalty(lengths, config.rollout.max_new_tokens, config.filter.overlong_buffer)
            rewards = rewards - config.filter.overlong_penalty * penalty
        return rewards

    def _check_signal(self, groups: list["Group"]) -> None:
        self.steps_without_signal = 0 if any(group.has_signal for group in groups) else self.steps_without_signal + 1
        if self.steps_without_signal == STEPS_WITHOUT_SIGNAL:
            raise RolloutError(
                f"in {STEPS_WITHOUT_SIGNAL} steps in a row no prompt had completions with different rewards, so there "
                f"is nothing to learn: look at {self.run.directory.rollouts}, use easier or harder prompts, or raise "
                "rollout.group_size"
            )

    def _warn(self, step: Step) -> None:
        """Says on the console what is wrong with a step's rollouts."""
        if self.steps_without_signal == 1:
            self.run.say(f"warning: no group of step {self.run.step} has rewards that differ; it taught nothing")
        if step.row["rollout/failed"]:
            self.run.say(
                f"warning: {step.row['rollout/failed']} completions of step {self.run.step} failed and their groups "
                "were left out; rollouts/ has the errors"
            )
        error = step.row.get("train/logprob_error")
        if error is not None and error > self.config.rollout.warn_logprob_error:
            self.run.say(
                f"warning: train/logprob_error is {error:.3f} in step {self.run.step}, above "
                f"rollout.warn_logprob_error={self.config.rollout.warn_logprob_error}: the engine that writes "
                "completions and the model that learns from them disagree"
            )

    # --- what the loss gets

    def _pack(self, groups: list["Group"]) -> list[PackedStep]:
        """The global batch of each update."""
        count = self.config.batch.updates
        return [
            pack_step(
                [self._sequence(group, rollout) for group in groups[i::count] for rollout in group.rollouts],
                self.config.batch.row_tokens,
                self.handle.layout,
                self.handle.flops,
            )
            for i in range(min(count, len(groups)))
        ]

    def _sequence(self, group: "Group", rollout: Rollout) -> TokenSequence:
        prompt, completion = group.prompt.token_ids, rollout.completion
        counts = not (self.config.filter.mask_overlong and completion.finish == "length")
        return TokenSequence(
            torch.tensor([*prompt, *completion.token_ids]),
            torch.tensor([False] * len(prompt) + [counts] * len(completion.token_ids)),
            {"rollout_logprobs": torch.tensor([0.0] * len(prompt) + completion.logprobs, dtype=torch.float64)},
        )

    def _with_logprobs(self, updates: list[PackedStep]) -> list[list[PackedBatch]]:
        """The rows of every update with log-probabilities of the policy before all of them, and of the reference."""
        rows = [batch for packed in updates for batch in packed.batches]
        temperature = self.config.rollout.temperature
        if not self.config.loss.on_policy:
            rows = self.engine.add_logprobs(rows, "old_logprobs", temperature)
        if self.reference is not None:
            with self.reference.in_place():
                rows = self.engine.add_logprobs(rows, "ref_logprobs", temperature)
        stream = iter(rows)
        return [[next(stream) for _ in packed.batches] for packed in updates]

    def _with_advantages(self, groups: list["Group"], updates: list[list[PackedBatch]]) -> list[list[PackedBatch]]:
        """The rows of every update with their advantages, which are computed over all groups together."""
        config, count = self.config, len(updates)
        rewards = torch.stack([group.rewards for group in groups])
        if config.needs_reference and config.loss.kl.where == "reward":
            penalties = [self._kl_sums(batches) for batches in updates]
            by_group = [penalties[i % count][i // count] for i in range(len(groups))]
            rewards = rewards - config.loss.kl.coefficient * torch.tensor(by_group, dtype=torch.float64)
        values = advantages(rewards, config.advantage)
        result = []
        for i, batches in enumerate(updates):
            flat = values[i::count].flatten()
            rows = []
            for batch in batches:
                pieces = [flat[place].expand(n) for place, n in zip(batch.order, batch.lengths, strict=False)]
                rows.append(add_values(batch, "advantages", pieces))
            result.append(rows)
        return result

    def _kl_sums(self, batches: list[PackedBatch]) -> list[list[float]]:
        """For each group of an update, the divergence from the reference summed over each completion."""
        own: dict[int, float] = {}
        for batch in batches:
            old, ref = batch.values["old_logprobs"], batch.values["ref_logprobs"]
            kl = torch.where(batch.loss_mask, kl_estimate(old, ref, self.config.loss.kl.estimator), 0.0)
            own |= zip(batch.order, (piece.sum().item() for piece in kl.split(batch.lengths)), strict=False)
        shares: list[dict[int, float]] = [{}] * self.handle.layout.parallel.num_data_ranks
        dist.all_gather_object(shares, own, group=self.handle.layout.data_control)
        flat = {place: total for share in shares for place, total in share.items()}
        size = self.config.rollout.group_size
        return [[flat[start + i] for i in range(size)] for start in range(0, len(flat), size)]

    # --- validation

    def _validate(self) -> dict[str, float]:
        """Mean reward and pass@1 of a completion of each held-out prompt."""
        temperature = self.config.rollout.validation_temperature
        groups = self.rollouts.collect(self.validation, group_size=1, temperature=temperature)
        pairs = [
            (prompt, rollout)
            for prompt, (rollout,) in zip(self.validation, groups, strict=True)
            if rollout.completion.finish != "error"
        ]
        if not pairs:
            raise RolloutError(f"every completion of a held-out prompt failed: {groups[0][0].completion.error}")
        rollouts = [rollout for _, rollout in pairs]
        self.samples = [
            Sample(
                prompt=self.tokenizer.decode(prompt.token_ids),
                completion=rollout.text,
                expected=f"{prompt.example.get('answer', '')} (reward {rollout.score.total:g})",
            )
            for prompt, rollout in pairs[: self.config.observe.samples]
        ]
        return {
            "val/reward_mean": sum(rollout.score.total for rollout in rollouts) / len(rollouts),
            "val/pass@1": sum(rollout.score.parts[0] >= 1 for rollout in rollouts) / len(rollouts),
        }

    def _records(self, groups: list["Group"]) -> list[dict[str, Any]]:
        """What is kept of the step's rollouts, one object a completion."""
        names = [reward.function for reward in self.config.rewards]
        return [
            {
                "prompt": self.tokenizer.decode(group.prompt.token_ids),
                "completion": rollout.text,
                "reward": reward,
                "rewards": dict(zip(names, rollout.score.parts, strict=True)),
                "errors": [*rollout.score.errors, *([rollout.completion.error] if rollout.completion.error else [])],
                "tokens": len(rollout.completion.token_ids),
                "finish": rollout.completion.finish,
            }
            for group in groups
            for rollout, reward in zip(group.rollouts, group.rewards.tolist(), strict=True)
        ]


class Group:
    """A prompt, its completions and their shaped rewards.

    Attributes:
        is_whole: no completion failed.
        has_signal: the rewards differ.
    """

    def __init__(self, prompt: Prompt, rollouts: list[Rollout], rewards: Tensor):
        self.prompt, self.rollouts, self.rewards = prompt, rollouts, rewards
        self.is_whole = all(rollout.completion.finish != "error" for rollout in rollouts)
        self.has_signal = bool(has_signal(rewards[None]))


def _rollout_metrics(groups: list[Group], config: GRPOConfig) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = torch.cat([group.rewards for group in groups])
    calls = len(rollouts) * len(config.rewards)
    errors = [error for rollout in rollouts for error in rollout.score.errors]
    if len(errors) == calls:
        raise InputError(f"every call of a reward failed in this step, the first: rewards.function={errors[0]}")
    parts = zip(*(rollout.score.parts for rollout in rollouts), strict=True)
    return {
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std().item(),
        "rollout/completion_tokens_mean": sum(len(r.completion.token_ids) for r in rollouts) / len(rollouts),
        "rollout/truncated": sum(r.completion.finish == "length" for r in rollouts) / len(rollouts),
        "rollout/failed": sum(r.completion.finish == "error" for r in rollouts),
        "rollout/reward_errors": len(errors),
        "rollout/groups_without_signal": sum(not group.has_signal for group in groups),
        "rollout/num_groups": len(groups),
        **{
            f"rollout/reward_{reward.function.rpartition(':')[2]}": sum(scores) / len(scores)
            for reward, scores in zip(config.rewards, parts, strict=True)
        },
    }


def _whole(updates: list[PackedStep]) -> PackedStep:
    """The sizes of all updates together."""
    return PackedStep(
        batches=[],
        num_sequences=sum(packed.num_sequences for packed in updates),
        num_tokens=sum(packed.num_tokens for packed in updates),
        num_rows=sum(packed.num_rows for packed in updates),
        num_truncated=0,
        num_dropped=0,
        flops=sum(packed.flops for packed in updates),
    )


def _make_loss(config: GRPOConfig) -> LossFn:
    if config.loss_function is None:
        longest = config.loss.max_completion_tokens or config.rollout.max_new_tokens
        return functools.partial(grpo_loss, config=config.loss.model_copy(update={"max_completion_tokens": longest}))
    module, _, name = config.loss_function.partition(":")
    try:
        loss: Callable = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"loss_function={config.loss_function}: cannot import it ({error})") from None
    return loss


def _check_context(config: GRPOConfig, handle: ModelHandle) -> None:
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    context = getattr(handle.config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise InputError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} is more than the model's context of "
            f"{context} tokens: lower one of them"
        )


def _steps_of_epochs(config: GRPOConfig, prompts: PromptStream) -> int:
    epochs = config.length.epochs or 0.0
    steps = round(epochs * sum(prompts.sampler.sizes)) // config.rollout.prompts
    if steps == 0:
        raise InputError(f"length.epochs={epochs} is less than one step of {config.rollout.prompts} prompts: raise it")
    return steps
