"""Validation of a policy on held-out prompts."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_rl.batch import single_media_tokens
from automodel_rl.config.algorithms import OnlineConfig
from automodel_rl.data.prompts import Prompt
from automodel_rl.data.stop_tokens import completion_stop_ids
from automodel_rl.errors import RolloutError, StoppedError
from automodel_rl.observe.metrics import MEASURED
from automodel_rl.rollout.evaluations.evaluations import Evaluations
from automodel_rl.rollout.groups import first_error, pass_rates
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rewards.counts import error_rates, metric_means
from automodel_rl.rollout.rollouts import Rollouts
from automodel_rl.rollout.seeds import mixed_seed
from automodel_rl.trainers.run import Run
from automodel_rl.trainers.samples import Sample
from automodel_rl.trainers.step import Step
from automodel_rl.weight_sync.published import has_version


@dataclass(frozen=True)
class _InFlightValidation:
    """A validation that evaluators are running beside training.

    Attributes:
        step: the step whose weights generate.
        weights: number and hash of their version.
        number: result of `Rollouts.submit`; None before submission.
    """

    step: int
    weights: tuple[int, str]
    number: int | None


class Validation:
    """Rewards of completions of held-out prompts. Evaluators, if any, generate them while training continues; the
    metrics then belong to an earlier step, given as `val/step`.

    Attributes:
        num_overlong, num_refused: held-out prompts dropped because they are too long, or refused.
        refused: why the first was refused.
    """

    def __init__(self, config: OnlineConfig, run: Run, rollouts: Rollouts):
        self.config, self.run, self.rollouts, self.fleet = config, run, rollouts, rollouts.fleet
        held_out = run.prompts(rollouts.schemas, held_out=True)
        self._in_flight: _InFlightValidation | None = None
        self.prompts = held_out.every_prompt()
        self.num_overlong, self.num_refused = held_out.num_overlong, held_out.num_refused
        self.refused = held_out.refused
        names = [Path(source.path).stem for source in config.data.validation]
        self.sources = [name if names.count(name) == 1 else f"{name}_{n}" for n, name in enumerate(names)]
        handle, variables = run.handle, config.data.chat_template_kwargs
        self.evaluations = Evaluations(
            config.validation,
            run.policy,
            rollouts.fleet,
            run.tokenizer,
            completion_stop_ids(handle.source, handle.whole_config, run.tokenizer, variables),
            min(config.longest_sequence, run.policy.packing.capacity),
            mixed_seed("evaluation", config.seed) % 2**31,
            str(handle.source),
            run.directory.environments,
            run.say,
        )

    @property
    def baseline(self) -> Callable[[], dict[str, float]] | None:
        """Measures the untrained model; None if no such measurement is configured."""
        return self.measure if self._has_something and self.config.length.validate_every else None

    @property
    def _has_something(self) -> bool:
        return bool(self.prompts) or self.evaluations.are_configured

    def measure_in(self, step: Step) -> None:
        """Adds validation metrics to a step that validates.

        Raises:
            RolloutError: every completion failed or got no reward. A checkpoint of the step is saved.
            StoppedError: a stop was requested while no evaluator was available. A checkpoint of the step is saved.
        """
        beside = bool(self.prompts) and self.fleet.evaluators is not None
        if not (self._has_something and (self.run.validates or (beside and self._in_flight is not None))):
            return
        try:
            with step.time("validate"):
                step.metrics |= self._measure_async() if beside else self.measure()
        except (RolloutError, StoppedError):  # the step itself is trained, so store it
            self.run.end_with(step)
            raise

    def measure(self) -> dict[str, float]:
        """Returns metrics of held-out prompts and of evaluations.

        Raises:
            RolloutError: every completion failed or got no reward.
        """
        return (self._measure_prompts() if self.prompts else {}) | self.evaluations.measure()

    def state_dict(self) -> dict[str, Any]:
        in_flight = self._in_flight
        return {} if in_flight is None else {"step": in_flight.step, "weights": [*in_flight.weights]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_flight = _InFlightValidation(state["step"], (*state["weights"],), None) if state else None
        self.run.checkpoints.unmeasured_step = state.get("step")
        self.fleet.needed = state["weights"][0] if state else None

    def go_on(self) -> None:
        """Restarts the validation that was in progress when the run stopped."""
        in_flight, publish = self._in_flight, self.config.weight_sync.publish
        if in_flight is None:
            return
        problem = "" if self.fleet.evaluators else "the run no longer has evaluators"
        if not problem:
            assert publish is not None
            if in_flight.weights[0] == self.fleet.newest[0]:  # published anew, with another hash
                in_flight = _InFlightValidation(in_flight.step, self.fleet.newest, None)
            elif not has_version(publish, *in_flight.weights):
                problem = f"{publish} no longer has its weights"
        if problem:
            self.run.say(f"warning: the validation of step {in_flight.step} is skipped: {problem}")
            self.load_state_dict({})
        else:
            self._submit(in_flight)

    def _measure_async(self) -> dict[str, float]:
        """Returns metrics found by evaluators, of this step or an earlier one, and starts this step's validation if
        it is due. A record holds one step's metrics, so the validation in progress is awaited before the next is
        due."""
        run, found = self.run, dict[str, float]()
        is_last_chance = run.is_over or run.validates_in(run.step + 1)
        if self._in_flight is not None and (run.validates or is_last_chance or self._is_written):
            found = self._take()
        if run.validates:
            if found:  # only in a resumed run that validates more often than before
                run.say(f"validation of step {found[MEASURED]:.0f}: val reward {found['val/reward_mean']:.3f}")
            self._submit(_InFlightValidation(run.step, self.fleet.newest, None))
            found = (self._take() if is_last_chance else {}) | self.evaluations.measure()
        return found

    @property
    def _is_written(self) -> bool:
        assert self._in_flight is not None
        assert self._in_flight.number is not None
        return self.rollouts.is_written(self._in_flight.number)

    def _submit(self, in_flight: _InFlightValidation) -> None:
        rollout = self.rollouts.config.rollout
        self.fleet.evaluate(*in_flight.weights)
        self.fleet.needed = in_flight.weights[0]
        number = self.rollouts.submit(
            self.prompts, rollout.validation_samples, rollout.validation_sampling, fleet=self.fleet.evaluators
        )
        self._in_flight, self.run.checkpoints.unmeasured_step = (
            _InFlightValidation(in_flight.step, in_flight.weights, number),
            in_flight.step,
        )

    def _take(self) -> dict[str, float]:
        in_flight = self._in_flight
        assert in_flight is not None
        assert in_flight.number is not None
        groups = self.rollouts.take(in_flight.number)
        self._in_flight = self.fleet.needed = None
        metrics = self._metrics_of(groups, in_flight.step)
        if in_flight.step == self.run.step:
            self.run.checkpoints.unmeasured_step = None  # the step's own record decides
        else:
            self.run.checkpoints.record_metric(in_flight.step, metrics[self.run.goal.best_metric])
        return {MEASURED: in_flight.step, **metrics}

    def _measure_prompts(self) -> dict[str, float]:
        """Metrics of completions of all held-out prompts: mean reward, error rates of rewards, and pass rates if
        configured.

        Raises:
            RolloutError: every completion failed or got no reward.
        """
        if self.fleet.evaluators is not None:
            self._submit(_InFlightValidation(self.run.step, self.fleet.newest, None))
            return self._take()
        rollout = self.rollouts.config.rollout
        try:
            with self.fleet.awake():
                groups = self.rollouts.collect(self.prompts, rollout.validation_samples, rollout.validation_sampling)
        finally:
            if self.fleet.crew.is_intact:
                self.fleet.restore()
        return self._metrics_of(groups, self.run.step)

    def _metrics_of(self, groups: Sequence[Sequence[Rollout]], step: int) -> dict[str, float]:
        """Metrics of a step's completions. A failed one has reward 0 and does not pass.

        Raises:
            RolloutError: every completion failed or got no reward.
        """
        rollouts = [rollout for group in groups for rollout in group]
        failed = [rollout for rollout in rollouts if rollout.has_failed]
        called = [rollout.score for rollout in rollouts if not rollout.has_failed]
        if not any(rollout.is_rewarded for rollout in rollouts):
            raise RolloutError(
                f"every completion of a held-out prompt failed or got no reward: {first_error(rollouts)}"
            )
        for warning in self.rollouts.errors.warnings(called, f"the validation of step {step}"):
            self.run.say(warning)
        if failed:
            self.run.say(
                f"warning: {len(failed)} of {len(rollouts)} held-out completions of step {step} failed, and count as "
                f"reward 0 and not passed; first error: {first_error(failed)}"
            )
        written = zip(self.prompts, [[r for r in group if r.is_rewarded] for group in groups], strict=True)
        samples = itertools.islice(((prompt, group) for prompt, group in written if group), self.config.observe.samples)
        self.run.save_samples([self._sample(*pair) for pair in samples], step)
        measured = [[r.measured for r in group if not r.measured.score.is_excluded] for group in groups]
        pairs = [(prompt, group) for prompt, group in zip(self.prompts, measured, strict=True) if group]
        scores = [rollout.score for _, group in pairs for rollout in group]
        of_prompts = [[rollout.score for rollout in group] for _, group in pairs]
        rates = {} if self.config.pass_criterion is None else pass_rates(of_prompts, *self.config.pass_criterion)
        return {
            "val/reward_mean": sum(score.total for score in scores) / len(scores),
            "val/failed": len(failed),
            **{f"val/{name}": rate for name, rate in rates.items()},
            **{f"val/error_rate_{n}": rate for n, rate in error_rates(called, self.config.reward_names).items()},
            **{f"val/{name}": mean for name, mean in metric_means(scores, self.config.reward_names).items()},
            **self._of_sources(pairs),
        }

    def _of_sources(self, pairs: Sequence[tuple[Prompt, Sequence[Rollout]]]) -> dict[str, float]:
        """Mean reward and pass rates by source, if there is more than one."""
        found: dict[str, float] = {}
        for number, name in enumerate(self.sources if len(self.sources) > 1 else ()):
            of_source = [[rollout.score for rollout in group] for prompt, group in pairs if prompt.source == number]
            if not of_source:
                continue
            scores = [score for of_prompt in of_source for score in of_prompt]
            found[f"val/{name}/reward_mean"] = sum(score.total for score in scores) / len(scores)
            rates = {} if self.config.pass_criterion is None else pass_rates(of_source, *self.config.pass_criterion)
            found |= {f"val/{name}/{rate}": value for rate, value in rates.items()}
        return found

    def _sample(self, prompt: Prompt, group: Sequence[Rollout]) -> Sample:
        return Sample(
            prompt=self.run.tokenizer.decode(single_media_tokens(prompt.token_ids, prompt.media)),
            completion=group[0].text,
            expected=f"{prompt.example.get('answer', '')} (reward {group[0].score.total:g})",
        )
