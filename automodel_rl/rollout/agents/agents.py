"""Agents of a run: starts an agent per episode, and passes its calls to generators."""

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from automodel_rl.config import RolloutRunConfig
from automodel_rl.data.template import ChatTemplate
from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.generator_messages import Request
from automodel_rl.generators.protocol import Completion, Generator, fail_unfinished
from automodel_rl.launch.background import in_thread
from automodel_rl.rollout.agents.codecs import ChatCodecs
from automodel_rl.rollout.agents.endpoint import Endpoint
from automodel_rl.rollout.agents.episode import AgentEpisode, AgentLimits, EpisodeEnded, EpisodeFailed, TurnRequested
from automodel_rl.rollout.agents.protocol import AgentResult
from automodel_rl.rollout.agents.runner import AgentRunner, ForkedAgents, VerifiersAgents
from automodel_rl.rollout.protocol import Promptlike
from automodel_rl.rollout.seeds import mixed_seed

MAX_METRICS = 64
"""Largest number of metrics of an agent, since each record of the run contains them."""

SLOT_POLL_SECONDS = 0.1
"""Seconds between checks whether more episodes may begin."""

PAUSE_SECONDS = 0.05
"""Seconds that a generator that does not work alone waits for further calls, once half of the agents wait for it."""

LONG_PAUSE_SECONDS = 0.5
"""Seconds that it waits while fewer agents wait for it."""


@dataclass(frozen=True)
class _AgentTurnGenerated:
    """A turn that the generator wrote, or its failure."""

    asked: TurnRequested
    completion: "Future[Completion]"


class Agents:
    """Creates and runs episodes of agents.

    Args:
        folder: folder for the log of the agents' output.
        newest_version: returns the newest policy version.
        needs_reward: whether agents must return a reward.

    Attributes:
        stop_ids: tokens with which the chat template ends turns.
        notes: one-line notes for the console, by topic.

    Raises:
        InputError: the agent cannot be imported, or the endpoint cannot listen.
    """

    def __init__(
        self,
        config: RolloutRunConfig,
        template: ChatTemplate,
        folder: Path,
        newest_version: Callable[[], int],
        *,
        needs_reward: bool,
    ):
        rollout = config.rollout
        self.seed, self.newest_version, self.needs_reward = config.seed, newest_version, needs_reward
        self.failed = None if rollout.agent_failed == "leave_out" else rollout.agent_failed
        self.codecs = ChatCodecs(template)
        self.stop_ids = self.codecs.stop_ids
        self.limits = AgentLimits(
            rollout.max_turns,
            config.longest_sequence,
            rollout.max_new_tokens,
            rollout.agent_seconds,
            rollout.max_staleness,
        )
        self.notes: dict[str, str] = {}
        self._overridden: dict[str, object] = {}
        self._slots = threading.Semaphore(rollout.max_episodes * config.world_size)
        self._runner: AgentRunner
        if rollout.verifiers is not None:
            self._runner = VerifiersAgents(rollout.verifiers, rollout.max_turns)
        else:
            assert rollout.agent is not None
            self._runner = ForkedAgents(rollout.agent, folder / "agents.log")
        try:
            self._endpoint = Endpoint(rollout.agent_host)
        except BaseException:
            self._runner.close()
            raise

    def episode(self, prompt: Promptlike, request: Request) -> AgentEpisode:
        """Creates an episode whose calls inherit the settings of `request`.

        Raises:
            InputError: the prompt has images or clips.
        """
        if prompt.media:
            raise InputError(f"prompt {prompt.number} has media, which agents cannot send: remove rollout.agent")
        example = {**prompt.example, "messages": list(prompt.messages)}
        seed = mixed_seed("environment", self.seed, prompt.number) % 2**32
        return AgentEpisode(request, example, seed, self.codecs, self.limits, self.newest_version)

    def submit(self, generator: Generator, episodes: Sequence[AgentEpisode]) -> "list[Future[Completion]]":
        """Begins episodes, or resumes them after a generator was lost, in a thread.

        Returns:
            A future per episode. It raises the generator's error; agents then keep waiting for their turns.
        """
        work = _AgentWork(generator, episodes, self._slots, self._start)
        in_thread(work.drive, "agents")
        return work.completions

    def close(self) -> None:
        """Ends all agents and the endpoint."""
        self._runner.close()
        self._endpoint.close()

    def _start(self, episode: AgentEpisode) -> None:
        """Runs an episode's agent in the endpoint's event loop."""

        def done(future: "Future[None]") -> None:
            if future.cancelled():
                episode.report_failure(ConnectionError("the endpoint of the agents was closed"))
            elif (error := future.exception()) is not None:
                episode.report_failure(error)

        asyncio.run_coroutine_threadsafe(self._run(episode), self._endpoint.loop).add_done_callback(done)

    async def _run(self, episode: AgentEpisode) -> None:
        """Runs an episode's agent, and ends the episode when the agent returns, fails or times out."""
        address = self._endpoint.open(episode, episode.seed)
        has_returned: asyncio.Future[tuple[AgentResult, str]] = self._endpoint.loop.create_future()

        def returned(result: AgentResult, error: str) -> None:
            if len(result.metrics) > MAX_METRICS:
                error = f"it returned {len(result.metrics)} metrics, more than {MAX_METRICS}: return fewer"
                result = AgentResult(None)
            if not has_returned.done():
                has_returned.set_result((result, error and f"the agent failed: {error}"))

        try:
            end_agent = await self._runner.begin(address, episode.example, returned)
        except Exception as error:  # for example at the limit of processes or open files
            text = f"the agent failed: it could not be started ({describe_root_cause(error)})"
            self._end(episode, AgentResult(None), text)
            return
        episode.begin()
        await asyncio.wait([has_returned], timeout=self.limits.seconds)
        if has_returned.done():
            self._end(episode, *has_returned.result())
        else:
            end_agent()
            late = f"the agent failed: it took longer than rollout.episode_seconds={self.limits.seconds:g}"
            self._end(episode, AgentResult(None), late)

    def _end(self, episode: AgentEpisode, result: AgentResult, error: str) -> None:
        self._endpoint.forget(episode)
        episode.finish(result, self.failed, error, needs_reward=self.needs_reward)
        self._overridden |= episode.overridden
        if self._overridden:
            asked = ", ".join(f"{name}={value}" for name, value in sorted(self._overridden.items()))
            self.notes["overridden"] = (
                f"agents requested {asked}: ignored: the run sets the sampling, and the model decides on tool calls"
            )
        if episode.refused:
            self.notes["refused"] = (
                f"warning: a request of an agent was refused: {episode.refused[0]}; rollout/refused_calls counts them"
            )


@dataclass
class _AgentWork:
    """The episodes of one call of `submit`.

    Attributes:
        events: events of agents and the generator.
        calls: calls that have not been submitted yet.
        num_started: number of episodes begun, in order.
        num_finished: number of finished episodes.
    """

    generator: Generator
    episodes: Sequence[AgentEpisode]
    slots: threading.Semaphore
    start: Callable[[AgentEpisode], None]
    events: "SimpleQueue[TurnRequested | EpisodeEnded | EpisodeFailed | _AgentTurnGenerated]" = field(
        default_factory=SimpleQueue
    )
    calls: list[TurnRequested] = field(default_factory=list)
    num_started: int = 0
    num_finished: int = 0

    def __post_init__(self) -> None:
        self.completions: list[Future[Completion]] = [Future() for _ in self.episodes]
        self._index_of = {id(episode): index for index, episode in enumerate(self.episodes)}

    def drive(self) -> None:
        """Handles events until all episodes are over. An error fails the remaining ones."""
        try:
            while self.num_finished < len(self.episodes):
                self._begin()
                self._process_events()
                self._ask()
        except BaseException as error:
            for _ in range(self.num_started - self.num_finished):
                self.slots.release()
            fail_unfinished(self.completions, error)

    def _begin(self) -> None:
        """Begins, or resumes, as many episodes as the limit allows."""
        while self.num_started < len(self.episodes) and self.slots.acquire(blocking=False):
            episode = self.episodes[self.num_started]
            self.num_started += 1
            episode.attach(self.events)
            if not episode.has_begun:
                episode.has_begun = True
                self.start(episode)

    def _process_events(self) -> None:
        """Handles events: at least one, or until more episodes may begin. If the generator does not work alone, also
        collects further calls for a moment."""
        until = None if self.num_started == len(self.episodes) else time.monotonic() + SLOT_POLL_SECONDS
        while True:
            with contextlib.suppress(queue.Empty):  # another `submit` may have made room
                self._handle(self.events.get(timeout=None if until is None else max(0.0, until - time.monotonic())))
            while not self.events.empty():
                self._handle(self.events.get())
            if self.generator.writes_in_background or not self.calls or self.num_finished == len(self.episodes):
                return
            running = self.num_started - self.num_finished
            num_waiting = len({id(asked.episode) for asked in self.calls})
            if num_waiting == running:
                return
            pause = PAUSE_SECONDS if 2 * num_waiting >= running else LONG_PAUSE_SECONDS
            if self.events.empty():
                try:
                    self._handle(self.events.get(timeout=pause))
                except queue.Empty:
                    return
            until = time.monotonic()

    def _handle(self, event: TurnRequested | EpisodeEnded | EpisodeFailed | _AgentTurnGenerated) -> None:
        match event:
            case TurnRequested():
                self.calls.append(event)
            case EpisodeEnded(episode):
                self.num_finished += 1
                self.slots.release()
                self.completions[self._index_of[id(episode)]].set_result(episode.completion)
            case _AgentTurnGenerated(asked, written):
                completion = written.result()
                call = asked.episode.waiting.get(asked.number)
                if call is not None:
                    call.give(completion)
            case EpisodeFailed(error):
                raise error

    def _ask(self) -> None:
        """Submits all waiting calls."""
        pairs = [(asked, asked.episode.waiting.get(asked.number)) for asked in self.calls]
        asked = [(one, call) for one, call in pairs if call is not None]  # the episodes of others are over
        self.calls = []
        if not asked:
            return

        completions = self.generator.submit([call.request for _, call in asked])
        for (one, _), completion in zip(asked, completions, strict=True):
            completion.add_done_callback(functools.partial(self._on_turn_generated, one))
        if not self.generator.writes_in_background:
            futures.wait(completions, return_when=futures.FIRST_EXCEPTION)

    def _on_turn_generated(self, asked: TurnRequested, completion: "Future[Completion]") -> None:
        self.events.put(_AgentTurnGenerated(asked, completion))
