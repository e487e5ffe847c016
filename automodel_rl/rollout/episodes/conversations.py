"""Conversations of a run with tools or an environment."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from automodel_rl.config import RolloutRunConfig
from automodel_rl.data.template import ChatTemplate
from automodel_rl.data.tool_formats import find_format
from automodel_rl.generator_messages import Request
from automodel_rl.generators.protocol import Completion, Generator
from automodel_rl.rollout.episodes.chat_turns import ChatTurns
from automodel_rl.rollout.episodes.driver import EpisodeDriver
from automodel_rl.rollout.episodes.environment_pool import EnvironmentPool
from automodel_rl.rollout.episodes.environment_server import Setup
from automodel_rl.rollout.episodes.episode import Episode, Limits
from automodel_rl.rollout.protocol import Promptlike
from automodel_rl.rollout.rewards.reward_model import PROMPT
from automodel_rl.rollout.seeds import mixed_seed


class Conversations:
    """Creates and runs episodes with tools or an environment.

    Args:
        folder: folder for the log of the environments' output.

    Attributes:
        schemas: JSON schemas of the tools.
        stop_ids: tokens with which the chat template ends turns.
        warning: one line about sandboxing that the system does not support; empty if nothing is missing.

    Raises:
        InputError: tools or the environment cannot be imported, or the chat template does not support calls.
    """

    def __init__(self, config: RolloutRunConfig, template: ChatTemplate, folder: Path):
        rollout = config.rollout
        setup = Setup(
            rollout.environment,
            rollout.tools,
            rollout.tool_seconds,
            rollout.sandbox,
            str(folder / "environments.log"),
        )
        self.seed = config.seed
        self.pool = EnvironmentPool(setup, ends_on_bad_call=rollout.on_bad_call == "end")
        self.schemas, self.warning = self.pool.schemas, self.pool.warning
        try:
            form = find_format(template) if self.schemas else None
            self._codec = ChatTurns(template, self.schemas, form, rollout.max_tool_tokens)
            self.stop_ids = self._codec.stop_ids
        except BaseException:
            self.pool.close()
            raise
        self._limits = Limits(
            rollout.max_prompt_tokens,
            rollout.max_turns,
            rollout.completion_tokens,
            rollout.max_new_tokens,
            rollout.episode_seconds,
        )
        self._driver = EpisodeDriver(rollout.max_episodes * config.world_size)

    def episode(self, prompt: Promptlike, request: Request) -> Episode:
        """Creates an episode. All episodes of a prompt have the same environment seed."""
        seed = mixed_seed("environment", self.seed, prompt.number) % 2**32  # the limit of numpy.random.seed
        environment = self.pool.open({**prompt.example, "messages": list(prompt.messages)}, seed)
        return Episode(request, prompt.messages, environment, self._codec, self._limits)

    def submit(self, generator: Generator, episodes: Sequence[Episode]) -> "list[Future[Completion]]":
        """See `EpisodeDriver.submit`."""
        return self._driver.submit(generator, episodes)

    def close(self) -> None:
        """Ends all environments."""
        self._driver.close()
        self.pool.close()


def scored_example(prompt: Promptlike, completion: Completion) -> dict[str, object]:
    """Returns the prompt's record for rewards, with the messages of the prompt and those of the whole conversation, if
    any."""
    example = {**prompt.example, PROMPT: list(prompt.messages)}
    if completion.conversation is None:
        return example
    return example | {
        "messages": completion.conversation.messages,
        "environment_reward": completion.conversation.reward,
    }
