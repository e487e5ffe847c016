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
from automodel_rl.errors import InputError, innermost
from automodel_rl.generator_messages import Request
from automodel_rl.generators.protocol import Completion, Generator, fail_unfinished
from automodel_rl.launch.background import in_thread
from automodel_rl.rollout.agents.codecs import ChatCodecs
from automodel_rl.rollout.agents.endpoint import Endpoint
from automodel_rl.rollout.agents.episode import AgentEpisode, AgentLimits, Asked, Broken, Ended
from automodel_rl.rollout.agents.protocol import AgentResult
from automodel_rl.rollout.agents.runner import AgentRunner, ForkedAgents, VerifiersAgents
from automodel_rl.rollout.protocol import Promptlike
from automodel_rl.rollout.seeds import mixed_seed

MOST_METRICS = 64
"""Largest number of metrics of an agent, since each record of the run contains them."""

ROOM_SECONDS = 0.1
"""Seconds between checks whether more episodes may begin."""

PAUSE_SECONDS = 0.05
"""Seconds that a generator that does not work alone waits for further calls, once half of the agents wait for it."""

LONG_PAUSE_SECONDS = 0.5
"""Seconds that it waits while fewer agents wait for it."""


@dataclass(frozen=True)
class _TurnWritten:
    """A turn that the generator wrote, or its failure."""

    asked: Asked
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
        self._room = threading.Semaphore(rollout.max_episodes * config.world_size)
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
        work = _AgentWork(generator, episodes, self._room, self._start)
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
                episode.break_off(ConnectionError("the endpoint of the agents was closed"))
            elif (error := future.exception()) is not None:
                episode.break_off(error)

        asyncio.run_coroutine_threadsafe(self._run(episode), self._endpoint.loop).add_done_callback(done)

    async def _run(self, episode: AgentEpisode) -> None:
        """Runs an episode's agent, and ends the episode when the agent returns, fails or times out."""
        address = self._endpoint.open(episode, episode.seed)
        has_returned: asyncio.Future[tuple[AgentResult, str]] = self._endpoint.loop.create_future()

        def returned(result: AgentResult, error: str) -> None:
            if len(result.metrics) > MOST_METRICS:
                error = f"it returned {len(result.metrics)} metrics, more than {MOST_METRICS}: return fewer"
                result = AgentResult(None)
            if not has_returned.done():
                has_returned.set_result((result, error and f"the agent failed: {error}"))

        try:
            end_agent = await self._runner.begin(address, episode.example, returned)
        except Exception as error:  # for example at the limit of processes or open files
            text = f"the agent failed: it could not be started ({innermost(error)})"
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
        news: events of agents and the generator.
        calls: calls that have not been submitted yet.
        begun: number of episodes begun, in order.
        over: number of finished episodes.
    """

    generator: Generator
    episodes: Sequence[AgentEpisode]
    room: threading.Semaphore
    start: Callable[[AgentEpisode], None]
    news: "SimpleQueue[Asked | Ended | Broken | _TurnWritten]" = field(default_factory=SimpleQueue)
    calls: list[Asked] = field(default_factory=list)
    begun: int = 0
    over: int = 0

    def __post_init__(self) -> None:
        self.completions: list[Future[Completion]] = [Future() for _ in self.episodes]
        self._places = {id(episode): place for place, episode in enumerate(self.episodes)}

    def drive(self) -> None:
        """Handles events until all episodes are over. An error fails the remaining ones."""
        try:
            while self.over < len(self.episodes):
                self._begin()
                self._listen()
                self._ask()
        except BaseException as error:
            for _ in range(self.begun - self.over):
                self.room.release()
            fail_unfinished(self.completions, error)

    def _begin(self) -> None:
        """Begins, or resumes, as many episodes as the limit allows."""
        while self.begun < len(self.episodes) and self.room.acquire(blocking=False):
            episode = self.episodes[self.begun]
            self.begun += 1
            episode.attach(self.news)
            if not episode.has_begun:
                episode.has_begun = True
                self.start(episode)

    def _listen(self) -> None:
        """Handles events: at least one, or until more episodes may begin. If the generator does not work alone, also
        collects further calls for a moment."""
        until = None if self.begun == len(self.episodes) else time.monotonic() + ROOM_SECONDS
        while True:
            with contextlib.suppress(queue.Empty):  # another `submit` may have made room
                self._handle(self.news.get(timeout=None if until is None else max(0.0, until - time.monotonic())))
            while not self.news.empty():
                self._handle(self.news.get())
            if self.generator.works_alone or not self.calls or self.over == len(self.episodes):
                return
            running = self.begun - self.over
            num_waiting = len({id(asked.episode) for asked in self.calls})
            if num_waiting == running:
                return
            pause = PAUSE_SECONDS if 2 * num_waiting >= running else LONG_PAUSE_SECONDS
            if self.news.empty():
                try:
                    self._handle(self.news.get(timeout=pause))
                except queue.Empty:
                    return
            until = time.monotonic()

    def _handle(self, event: Asked | Ended | Broken | _TurnWritten) -> None:
        match event:
            case Asked():
                self.calls.append(event)
            case Ended(episode):
                self.over += 1
                self.room.release()
                self.completions[self._places[id(episode)]].set_result(episode.completion)
            case _TurnWritten(asked, written):
                completion = written.result()
                call = asked.episode.waiting.get(asked.number)
                if call is not None:
                    call.give(completion)
            case Broken(error):
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
            completion.add_done_callback(functools.partial(self._tell_written, one))
        if not self.generator.works_alone:
            futures.wait(completions, return_when=futures.FIRST_EXCEPTION)

    def _tell_written(self, asked: Asked, completion: "Future[Completion]") -> None:
        self.news.put(_TurnWritten(asked, completion))
