"""Reinforcement learning on prompts with rewards (GRPO): rollouts, advantages, optimizer steps, weight sync."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator
from pathlib import Path

from automodel_rl.batch import single_media_tokens
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.data.loader import PackedStep
from automodel_rl.data.prompts import PromptStream
from automodel_rl.engine import Engine, TrainOutput
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.generators.weight_probe import WeightProbe
from automodel_rl.losses import LossFn, Readout, grpo_loss
from automodel_rl.losses.disagreement import effective_sample_size
from automodel_rl.observe.samples import Sample
from automodel_rl.rollout.collect import RolloutCollector
from automodel_rl.rollout.episodes.conversations import Conversations
from automodel_rl.rollout.groups import (
    Group,
    all_scores,
    first_error,
    pass_rates,
    rollout_metrics,
    rollout_records,
    shaped_rewards,
)
from automodel_rl.rollout.rewards.counts import ErrorWatch, error_rates, metric_means
from automodel_rl.rollout.rewards.scorer import Score, Scorer
from automodel_rl.trainers.batch_epochs import shuffled, values_of, with_values
from automodel_rl.trainers.open_run import choose_loss, layout_summary, open_run
from automodel_rl.trainers.policy_batches import Microbatches, pack_optimizer_steps, with_advantages
from automodel_rl.trainers.reward_watch import RewardWatch
from automodel_rl.trainers.rollout_details import Details, rollout_details
from automodel_rl.trainers.rollout_queue import RolloutQueue
from automodel_rl.trainers.route_exchange import with_routes
from automodel_rl.trainers.run import Goal, Run
from automodel_rl.trainers.step import Step


class GRPOTrainer:
    """Trains a policy on rewards. Every rank of the job makes one and calls `train`.

    Args:
        config: the run's config.
        resume: "auto" to go on from the newest checkpoint in the run directory, or begin if there is none; "never" to
            begin; or the folder of a checkpoint to go on from.
        max_minutes: minutes after which the run saves and stops; None for no limit.

    Raises:
        InputError: the config, the data or the checkpoint is wrong. Nothing has been written.

    Example:
        >>> GRPOTrainer(load_config("my_grpo.yaml")).train().name  # doctest: +ELLIPSIS
        loading ...
        1 steps: ...
        'final'
    """

    def __init__(self, config: GRPOConfig, resume: str = "never", max_minutes: float | None = None):
        self.loss = choose_loss(config, _own_loss(config))
        config, directory, chat, self.handle = open_run(config, resume)
        conversations = None
        if config.rollout.has_turns:
            conversations = Conversations(config, chat.template, directory.environments)
            config = conversations.with_stops(config)
        self.config = config
        self.tokenizer = chat.tokenizer
        seed = config.seed if config.data.shuffle else None
        tools = conversations.schemas if conversations else ()
        self.prompts = PromptStream(config.data.train, chat, config.rollout.max_prompt_tokens, seed, tools)
        self.prompts.check_fit()
        held_out = PromptStream(config.data.validation, chat, config.rollout.max_prompt_tokens, None, tools)
        self.validation = held_out.every_prompt()
        self.num_held_out_overlong = held_out.num_overlong
        self.mentioned_overlong = self.mentioned_memory = self.mentioned_invalid = False
        self.readout = Readout(config.rollout.temperature, entropy=True)
        total_steps = config.length.steps or _steps_of_epochs(config, self.prompts)
        self.engine = Engine(self.handle, config.optimizer, total_steps * config.batch.steps_of_all_epochs)
        # The reference is made of the model's first weights, before a checkpoint replaces them.
        self.reference = self._reference() if config.needs_reference else None
        self.errors = ErrorWatch(config.rewards)
        scorer = Scorer(config.rewards)
        self.supervisor = GeneratorSupervisor(config.generator_spec, self.engine, self.tokenizer)
        self.probe = WeightProbe(config, self.engine, self.supervisor, self.tokenizer)
        self.rollouts = RolloutCollector(config, self.supervisor, self.tokenizer, scorer, conversations)
        self.queue = RolloutQueue(self.prompts, self.rollouts, config.rollout)
        self.signal = RewardWatch(directory.rollouts)
        goal = Goal(total_steps, max_minutes, best_metric="val/reward_mean", higher_is_better=True)
        self.run = Run(config, directory, self.engine, goal)
        self.run.resume({"prompts": self.queue, "signal": self.signal})
        if conversations and conversations.warning:
            self.run.say(conversations.warning)

    def train(self) -> Path:
        """Runs to the end.

        Returns:
            The folder of the trained Hugging Face checkpoint.

        Raises:
            StoppedError: the run was stopped by SIGTERM, SIGHUP, Ctrl-C or its time limit; a checkpoint is saved.
            RolloutError: generators failed, or completions' rewards never differed; a checkpoint is saved.
        """
        if self.run.is_finished:
            self._end_rollouts()
            return self.run.leave_finished()
        if self.config.weight_sync.check_every:
            self.probe.check_changed_weights()
        self.supervisor.load_weights()
        baseline = self._validate if self.validation and self.config.length.validate_every else None
        for step in self.run.steps(self._summary(), baseline):
            generated, groups, packed = self._collect(step)
            with step.time("logprobs"):
                of_steps = self._with_logprobs(packed)
            with step.time("advantages"):
                of_steps = with_advantages(groups, of_steps, self.config, self.handle.layout)
            with step.time("details"):
                self._write_rollouts(generated, self._details(groups, of_steps))
            with step.time("train"):
                outputs = self._optimizer_steps(of_steps)
                for again, sizes in self._further_epochs(groups, of_steps, step):
                    outputs += self._optimizer_steps(again)
                    packed += sizes
            with step.time("sync"):
                self.supervisor.load_weights()
            step.record(outputs, functools.reduce(operator.add, (one.size for one in packed)))
            step.metrics |= effective_sample_size(step.metrics)
            self._warn(step)
            if self.validation and self.run.validates:
                self._validate_step(step)
        self._end_rollouts()
        self.run.save_model(self.tokenizer)
        return self.run.finish()

    @property
    def _is_probed(self) -> bool:
        """Whether this step compares what generators compute with what the model does."""
        every = self.config.weight_sync.check_every
        return bool(every) and self.run.step % every == 0

    def _reference(self) -> ReferenceWeights:
        return ReferenceWeights(self.handle, lends_memory=self.config.shares_memory)

    def _optimizer_steps(self, of_steps: list[Microbatches]) -> list[TrainOutput]:
        return [self.engine.train_step(microbatches, self.loss, self.readout) for microbatches in of_steps]

    def _further_epochs(
        self, groups: list[Group], of_steps: list[Microbatches], step: Step
    ) -> Iterator[tuple[list[Microbatches], list[PackedStep]]]:
        """The microbatches of every pass over the completions after the first, with what they were packed into."""
        epochs = self.config.batch.epochs
        values = values_of(groups, of_steps, self.handle.layout) if epochs > 1 else {}
        for epoch in range(1, epochs):
            order = shuffled(groups, self.config.seed, self.run.step, epoch)
            packed = self._pack(order, step)
            yield [*with_values(groups, order, packed, values)], packed

    def _end_rollouts(self) -> None:
        self.supervisor.close()
        self.rollouts.close()

    def _summary(self) -> str:
        rollout = self.config.rollout
        return (
            f"{rollout.prompts} prompts x {rollout.group_size} completions a step, of "
            f"{sum(self.prompts.sampler.sizes):,} prompts, {layout_summary(self.config, self.handle)}"
        )

    def _collect(self, step: Step) -> tuple[list[Group], list[Group], list[PackedStep]]:
        """Collects and packs rewarded completions of this step's prompts, and records their metrics.

        Returns:
            All groups, the groups to learn from, and the global batch of each optimizer step.
        """
        before = self.run.place()
        try:
            with self.supervisor.awake(step.time), step.time("rollout"):
                if self._is_probed:
                    self.probe.ask()
                generated, groups = self._generate()
            if self._is_probed:
                self.supervisor.offload.restore()
                self.probe.judge()
            self.signal.look_at(groups)
            step.metrics |= rollout_metrics(generated, self.config.reward_names, self.supervisor.policy_version)
            self._warn_of_errors(all_scores(generated), f"step {self.run.step}")
            with step.time("pack"):
                packed = self._pack(groups, step)
        except (RolloutError, InputError):
            self.supervisor.offload.restore()
            self.run.abandon_step(before)
            raise
        step.metrics["data/num_overlong_prompts"] = self.prompts.num_overlong
        self._mention_overlong()
        self._write_rollouts(generated, {})  # at once, so that they are there if the step fails
        return generated, groups, packed

    def _mention_overlong(self) -> None:
        """Says once that prompts are too long."""
        training, held_out = self.prompts.num_overlong, self.num_held_out_overlong
        if self.mentioned_overlong or not training + held_out:
            return
        self.mentioned_overlong = True
        self.run.say(
            f"warning: {training} of the first {self.prompts.num_drawn} prompts and {held_out} held-out ones are "
            f"longer than rollout.max_prompt_tokens={self.config.rollout.max_prompt_tokens} and left out; "
            "data/num_overlong_prompts counts them"
        )

    def _write_rollouts(self, generated: list[Group], details: Details) -> None:
        if self.run.is_first_rank:
            records = rollout_records(generated, self.config.reward_names, self.tokenizer, details)
            self.run.write_beside("rollouts", self.run.directory.rollouts, records)

    def _details(self, groups: list[Group], of_steps: list[Microbatches]) -> Details:
        """Details of the rollouts. In steps that are looked at most, the model's log-probabilities are among them."""
        is_looked_at = self.run.step == 1 or self.run.is_due(self.config.checkpoint.every_steps) or self.run.is_over
        if self.config.is_on_policy and is_looked_at and self.config.observe.samples:
            first, *others = of_steps
            of_steps = [[*self._add_logprobs(first[:1], "old_logprobs", replay=False), *first[1:]], *others]
        return rollout_details(groups, of_steps, self.tokenizer, self.handle.layout)

    def _generate(self) -> tuple[list[Group], list[Group]]:
        """All groups that were generated, and the groups to learn from."""
        rollout, filter = self.config.rollout, self.config.filter
        generated: list[Group] = []
        chosen: list[Group] = []
        batch = self.queue.next(self.run.steps_left)
        for refills in itertools.count():
            prompts, rollouts = batch
            new = [
                Group(prompt, group, shaped_rewards(group, filter, rollout.max_new_tokens))
                for prompt, group in zip(prompts, rollouts, strict=True)
            ]
            generated += new
            comparable = [group.scored for group in new if group.is_whole and group.is_comparable]
            chosen += [group for group in comparable if group.has_signal or not filter.dynamic]
            if len(chosen) == rollout.prompts or not filter.dynamic or refills == filter.max_refills:
                break
            batch = self.queue.more(rollout.prompts - len(chosen))
        if not chosen:  # without a penalty for length these do no harm, and the step still takes place
            chosen = [group.scored.unshaped for group in generated if group.is_whole and group.is_comparable]
        if not chosen:
            error = first_error(rollout for group in generated for rollout in group.rollouts)
            raise RolloutError(f"every group has completions that failed or got no reward, the first with: {error}")
        return generated, chosen

    def _pack(self, groups: list[Group], step: Step) -> list[PackedStep]:
        """The global batch of each optimizer step, with routes if they are replayed."""
        packed = pack_optimizer_steps(groups, self.config, self.handle)
        if self.config.router_replay.enabled:
            packed, metrics = with_routes(groups, packed, self.handle)
            step.metrics |= metrics
        return packed

    def _with_logprobs(self, packed: list[PackedStep]) -> list[Microbatches]:
        """Adds log-probabilities of the policy before this step, and of the reference, to all microbatches.

        The reference comes first: after a rollout, the policy's weights may still be on the host.
        """
        everything = [microbatch for one in packed for microbatch in one.microbatches]
        stages = self.config.router_replay.stages
        if self.reference is not None:
            with self.reference.in_place():
                everything = self._add_logprobs(everything, "ref_logprobs", replay="ref_logprobs" in stages)
        self.supervisor.offload.restore()
        if not self.config.is_on_policy:
            everything = self._add_logprobs(everything, "old_logprobs", replay="old_logprobs" in stages)
        if self.config.router_replay.compare:
            everything = self._add_logprobs(everything, "live_logprobs", replay=False)
        stream = iter(everything)
        return [[next(stream) for _ in one.microbatches] for one in packed]

    def _add_logprobs(self, microbatches: Microbatches, name: str, replay: bool) -> Microbatches:
        """Adds log-probabilities under the current weights to microbatches.

        Args:
            microbatches: the microbatches of all optimizer steps.
            name: the name of the log-probabilities.
            replay: follow the microbatches' routes, if they have any.
        """
        read = microbatches if replay else [dataclasses.replace(microbatch, routes=None) for microbatch in microbatches]
        scored = self.engine.add_logprobs(read, name, self.config.rollout.temperature)
        return [
            dataclasses.replace(microbatch, values=new.values)
            for microbatch, new in zip(microbatches, scored, strict=True)
        ]

    def _warn_of_errors(self, scores: list[Score], where: str) -> None:
        for warning in self.errors.warnings(scores, where):
            self.run.say(warning)

    def _warn(self, step: Step) -> None:
        """Warns on the console of problems with a step's rollouts."""
        if self.supervisor.offload.warning and not self.mentioned_memory:
            self.mentioned_memory = True
            self.run.say(self.supervisor.offload.warning)
        if self.signal.num_steps == 1:
            but = " but length" if self.config.filter.overlong_buffer and not self.config.filter.dynamic else ""
            self.run.say(f"warning: no group of step {self.run.step} has rewards that differ; it taught nothing{but}")
        if step.metrics["rollout/failed"]:
            self.run.say(
                f"warning: {step.metrics['rollout/failed']} completions of step {self.run.step} failed and their "
                "groups were left out; rollouts/ has the errors"
            )
        error = step.metrics.get("train/logprob_error")
        is_stale = (
            self.config.rollout.max_staleness > 0
        )  # stale completions come from older weights, so that a disagreement is expected
        self._warn_of_lost_tokens(step)
        if error is not None and error > self.config.rollout.warn_logprob_error and not is_stale:
            self.run.say(
                f"warning: train/logprob_error is {error:.3f} in step {self.run.step}, above "
                f"rollout.warn_logprob_error={self.config.rollout.warn_logprob_error}: the generator and the model "
                "that learns from its completions disagree"
            )

    def _warn_of_lost_tokens(self, step: Step) -> None:
        count = step.metrics["rollout/invalid_logprobs"]
        if count and not self.mentioned_invalid:
            self.mentioned_invalid = True
            self.run.say(
                f"warning: the generator gave no log-probability (nan, infinite or above 0) for {count} tokens of step "
                f"{self.run.step}, which are left out of the loss; rollout/invalid_logprobs counts them in every step"
            )

    def _validate_step(self, step: Step) -> None:
        try:
            with step.time("validate"):
                step.metrics |= self._validate()
        except RolloutError:  # the step itself is trained, so store it
            self.run.end_with(step)
            raise

    def _validate(self) -> dict[str, float]:
        """Metrics of completions of each held-out prompt: mean reward, error rates of rewards, and rates of passing
        if the config says which reward decides it."""
        rollout = self.config.rollout
        try:
            with self.supervisor.awake():
                groups = self.rollouts.collect(self.validation, rollout.validation_samples, rollout.validation_sampling)
        finally:
            self.supervisor.offload.restore()
        written = [[rollout for rollout in group if rollout.completion.finish != "error"] for group in groups]
        called = [rollout.score for group in written for rollout in group]
        self._warn_of_errors(called, f"the validation of step {self.run.step}")
        scored = [[rollout for rollout in group if not rollout.score.is_left_out] for group in written]
        pairs = [(prompt, group) for prompt, group in zip(self.validation, scored, strict=True) if group]
        if not pairs:
            error = first_error(rollout for group in groups for rollout in group)
            raise RolloutError(f"every completion of a held-out prompt failed or got no reward: {error}")
        samples = [
            Sample(
                prompt=self.tokenizer.decode(single_media_tokens(prompt.token_ids, prompt.media)),
                completion=group[0].text,
                expected=f"{prompt.example.get('answer', '')} (reward {group[0].score.total:g})",
            )
            for prompt, group in pairs[: self.config.observe.samples]
        ]
        self.run.save_samples(samples)
        scores = [rollout.score for _, group in pairs for rollout in group]
        of_prompts = [[rollout.score for rollout in group] for _, group in pairs]
        rates = {} if self.config.passing is None else pass_rates(of_prompts, *self.config.passing)
        return {
            "val/reward_mean": sum(score.total for score in scores) / len(scores),
            **{f"val/{name}": rate for name, rate in rates.items()},
            **{f"val/error_rate_{n}": rate for n, rate in error_rates(called, self.config.reward_names).items()},
            **{f"val/{name}": mean for name, mean in metric_means(scores, self.config.reward_names).items()},
        }


def _own_loss(config: GRPOConfig) -> LossFn:
    longest = config.loss.max_completion_tokens or config.rollout.sampled_tokens
    decided = {"max_completion_tokens": longest, "on_policy": config.is_on_policy}
    return functools.partial(grpo_loss, config=config.loss.model_copy(update=decided))


def _steps_of_epochs(config: GRPOConfig, prompts: PromptStream) -> int:
    epochs = config.length.epochs or 0.0
    steps = round(epochs * sum(prompts.sampler.sizes)) // config.rollout.prompts
    if steps == 0:
        raise InputError(f"length.epochs={epochs} is less than one step of {config.rollout.prompts} prompts: raise it")
    return steps
