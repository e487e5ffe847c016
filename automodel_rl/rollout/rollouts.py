"""Rollouts: rewarded completions of prompts, as a program asks for them."""

from collections.abc import Sequence

from automodel_rl.batch import Video
from automodel_rl.config import RewardConfig, RolloutRunConfig
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Sampling
from automodel_rl.generators.fleet import Fleet
from automodel_rl.rollout import jobs
from automodel_rl.rollout.protocol import Promptlike, Rollout
from automodel_rl.rollout.rewards.counts import ErrorWatch


class Rollouts:
    """Rewarded completions of prompts. Tools, environments and rewards start at once. A
    program calls the methods; nothing in it is a collective.

    Args:
        config: the run's config.
        fleet: the generators, which may be started later.
        rewards: the rewards.

    Attributes:
        schemas: JSON schemas of the tools that prompts offer.
        warning: what protection of tools the system does not allow, in one line; empty if nothing is missing.
        config: the config, whose completions also stop at the tokens with which the chat template ends turns, if there
            are several.
        errors: warns of rewards whose calls fail.

    Example:
        >>> def program(policy, fleet, run):
        ...     rollouts = Rollouts(run.config, fleet, run.config.rewards)
        ...     policy.begin()
        ...     fleet.start(rollouts.config.generator_spec)
        ...     fleet.sync()
        ...     (group,) = rollouts.collect(run.prompts().take(1), 2, run.config.rollout.sampling)
        ...     return len(group), group[0].is_rewarded
        >>> run_program(program, load_config("my_grpo.yaml"))  # doctest: +ELLIPSIS
        loading ...
        (2, True)

    Raises:
        InputError: tools, the environment or a reward cannot be started, or the chat template does not write calls.
    """

    def __init__(self, config: RolloutRunConfig, fleet: Fleet, rewards: Sequence[RewardConfig]):
        self.config, self.fleet, self.crew = config, fleet, fleet.crew
        self.schemas: tuple[dict[str, object], ...] = ()
        self.warning = ""
        self._num_begun = 0
        if config.rollout.has_turns:
            facts: jobs.ConversationFacts = self.crew.ask(jobs.OpenConversations())[0]
            self.schemas, self.warning = facts.schemas, facts.warning
            stops = tuple(sorted({*config.rollout.stop_token_ids, *facts.stop_ids}))
            rollout = config.rollout.model_copy(update={"stop_token_ids": stops})
            self.config = config.model_copy(update={"rollout": rollout})
        self.crew.ask(jobs.OpenRollouts(rewards))
        self.errors = ErrorWatch(rewards)

    def submit(self, prompts: Sequence[Promptlike], group_size: int, sampling: Sampling) -> int:
        """Lets generators begin to write. They go on while the model trains, if they have memory of their own.

        Args:
            prompts: the prompts.
            group_size: number of completions of each.
            sampling: how tokens are drawn, and where completions end.

        Returns:
            A number for `take`.

        Raises:
            InputError: a prompt has a video, and vLLM writes.
        """
        if self.config.rollout.generator.runs_vllm:
            _check_for_vllm(prompts)
        self._num_begun += 1
        self.crew.ask(jobs.BeginRollouts(self._num_begun, prompts, group_size, sampling))
        return self._num_begun

    def take(self, number: int, group_size: int, *, keeps_routes: bool = True) -> list[list[Rollout]]:
        """The rewarded completions of each prompt.

        Args:
            number: what `submit` returned.
            group_size: the group size that it got.
            keeps_routes: whether ranks keep the completions' routes for training.

        Raises:
            RolloutError: a generator failed more often than `rollout.retries` allows.
        """
        every: dict[int, Rollout] = {}
        for of_rank in self.crew.ask(jobs.TakeRollouts(number, keeps_routes)):
            every |= of_rank
        flat = [every[place] for place in range(len(every))]
        return [flat[start : start + group_size] for start in range(0, len(flat), group_size)]

    def collect(self, prompts: Sequence[Promptlike], group_size: int, sampling: Sampling) -> list[list[Rollout]]:
        """The rewarded completions of each prompt, whose routes nobody keeps.

        Args:
            prompts, group_size, sampling: as those of `submit`.

        Raises:
            RolloutError: a generator failed more often than `rollout.retries` allows.
        """
        return self.take(self.submit(prompts, group_size, sampling), group_size, keeps_routes=False)

    def close(self) -> None:
        """Ends the processes of rewards and environments."""
        self.crew.ask(jobs.CloseRollouts())


def _check_for_vllm(prompts: Sequence[Promptlike]) -> None:
    """Raises InputError if a prompt has a video."""
    for prompt in prompts:
        if any(isinstance(item, Video) for item in prompt.media):
            raise InputError(
                f"prompt {prompt.number} has a video: rollout.generator=vllm gets images only: use transformers, or "
                "give frames as images"
            )
