"""The supervisor of a rank's generator: starts it, gives it weights, restarts it when it fails, and closes it.

A generator on the trainer's device may share its memory in turns, as `memory.offload` and `rollout.generator.sleep`
ask:

    wake   moments to the host, vLLM's weights awake, weight sync, trainer's weights to the host, vLLM's cache awake
    rest   vLLM asleep, trainer's weights back on the device; moments come back for the next optimizer step

`rest` is two calls where something may come before the trainer's weights: `sleep` and `offload.restore`.
"""

import datetime
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import VllmServersConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.rollout_offload import RolloutOffload
from automodel_rl.errors import InputError, WeightSyncError, innermost
from automodel_rl.generators.engine_ranks import EngineRanks
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.generators.make_generator import make_generator, without_generator
from automodel_rl.generators.protocol import RankGenerator
from automodel_rl.generators.vllm_replicas import VllmReplicas
from automodel_rl.generators.vllm_servers import VllmServers
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.weight_sync.publisher import Publisher
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.transport import Transport

PATIENCE = datetime.timedelta(hours=12)
"""Longest time that ranks wait for a rank whose generator is slow. A rank that dies is noticed at once."""


PUBLISH_ATTEMPTS = 2
"""Attempts at writing a version. A file system that was away for a moment may be back."""


class _AgreedError(InputError):
    """A problem of one rank, which all of them know of."""


class GeneratorSupervisor:
    """Owns this rank's generator and its weight syncs. Methods are collectives of all ranks.

    Args:
        spec: the generator that is asked for.
        engine: trains the model whose weights the generator gets.
        tokenizer: the model's tokenizer.
        prepare: called with every generator that is started and its transport, before it gets weights.
        meanwhile: called on every rank while the first generators start.

    Raises:
        InputError: the generator does not start.

    Attributes:
        generator: this rank's generator; None after it could not be restarted.
        problem: why the generator cannot write, "" if it can. `restart` repairs it.
        policy_version: the policy version that generators got last, or get when they wake, from 1 on.
        offload: the trainer's memory, which generators have during rollouts.
        ranks: the ranks that lead generators, and those that share this rank's.
        published: the version that was published last, and its hash; None if it could not be.
        world: a process group of all ranks. Its collectives may take as long as generators do.
    """

    def __init__(
        self,
        spec: GeneratorSpec,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        prepare: Callable[[RankGenerator, Transport], None] = lambda generator, transport: None,
        meanwhile: Callable[[], None] = lambda: None,
    ):
        self.spec, self.engine, self.tokenizer, self.prepare = spec, engine, tokenizer, prepare
        self.handle = engine.handle
        self.world = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.ranks = EngineRanks.join(spec)
        self.offload = RolloutOffload(engine)
        self._is_awake = False
        self.published: tuple[int, str] | None = None
        self.problem, self._noting = "", threading.Lock()
        self.offload.after_sync()  # the generator starts in the memory that it will have
        self.generator: RankGenerator | None
        self.generator, transport = self._start_with_others(meanwhile)
        self.offload.restore()
        self.sync = WeightSync(self.handle, transport, spec.weight_sync, resends_frozen=spec.sleep_level == 2)
        folder = spec.weight_sync.publish
        self._publisher = None if folder is None else Publisher(self.handle, folder, spec.weight_sync)
        self._tried_to_publish: int | None = None
        self.policy_version = 0
        self._policy_version_of: dict[int, int] = {0: 0}  # by the number of the weight sync

    def load_weights(self, policy_version: int, needed: int | None = None) -> None:
        """Gives all generators the weights that the model has now. Those that sleep get them when they wake.

        Args:
            policy_version: the policy version of these weights, the same on all ranks; 0 of weights that no step
                made.
            needed: number of the oldest published version that somebody still reads; None if there is none.
        """
        self.policy_version = policy_version
        if self._publisher is not None:
            self._publisher.needed = needed
        if self._publisher is not None and policy_version and self.engine.step != self._tried_to_publish:
            self._publish(self._publisher)
        self._look_for_servers()
        if not self.spec.sleep_level:
            self._send()

    def wake(self) -> None:
        """Lets generators write, in the memory that they share with the trainer, until `rest`."""
        self._is_awake = True
        self.offload.before_sync()
        self._free_unused()
        self.ranks.meet()  # the generator may use the devices of all of them
        if self.spec.sleep_level:
            self._ask(lambda generator: generator.wake("weights", self.spec.weight_sync.timeout))
            self._send()
        self.offload.after_sync()
        self._free_unused()
        self.ranks.meet()
        if self.spec.sleep_level:
            self._ask(lambda generator: generator.wake("kv_cache", self.spec.weight_sync.timeout))

    def rest(self) -> None:
        """Gives the shared memory back to the trainer, whose weights then are there. Does nothing if generators have
        none of it."""
        self.sleep()
        self.offload.restore()

    def sleep(self) -> None:
        """Lets generators give the shared memory back. The trainer's weights stay where they are."""
        if not self._is_awake:
            return
        if self.spec.sleep_level:
            self._ask(lambda generator: generator.sleep(self.spec.sleep_level, PATIENCE.total_seconds()))
            if self.problem and self.generator is not None:
                self.generator.close()  # the trainer needs the memory
        self.ranks.meet()
        self._is_awake = False

    def lose(self, generator: RankGenerator | None, problem: str) -> None:
        """Notes why a generator cannot write, unless another one has taken its place. Any thread may call it.

        Args:
            generator: the generator.
            problem: why.
        """
        with self._noting:
            if generator is self.generator:
                self.problem = self.problem or problem

    def policy_versions(self, versions: tuple[int, int]) -> tuple[int, int]:
        """The policy versions that two weight syncs sent. A sync after a failure sends the same version again."""
        oldest, newest = versions
        return self._policy_version_of[oldest], self._policy_version_of[newest]

    def restart(self, failed: bool) -> None:
        """Restarts generators that failed, and gives all the newest weights. What still fails becomes `problem`.

        Args:
            failed: whether this rank's generator failed. It is then closed, and a new one started.
        """
        if failed:
            self._replace()
        else:
            self.sync.disconnect()  # the failed generator may be a member of this rank's links
            self._free_unused()
        # Waits: starting a generator may take longer than other collectives are allowed to.
        gather_objects("", self.world)
        was_awake = self._is_awake
        self.rest()
        if not self.spec.sleep_level:
            self._send()
        if was_awake:
            self.wake()

    def close(self) -> None:
        """Ends the generator."""
        self.sync.disconnect()
        if self.generator is not None:
            self.generator.close()

    def _look_for_servers(self) -> None:
        """Lets the next weight sync go to the servers that are there now, if others have gone or come."""
        if not isinstance(self.spec.choice, VllmServersConfig):
            return
        have_changed = isinstance(self.generator, VllmServers) and self.generator.have_changed
        if any(gather_objects(have_changed, self.world)):
            self.sync.disconnect()

    def _ask(self, ask: Callable[[GeneratorProcess | VllmReplicas], None]) -> None:
        """Asks the generator to sleep or to wake, unless it has failed. A failure becomes `problem`."""
        if self.problem or not isinstance(self.generator, GeneratorProcess | VllmReplicas):  # else it has no memory
            return
        try:
            ask(self.generator)
        except WeightSyncError as problem:
            self.problem = str(problem)

    def _start_with_others(self, meanwhile: Callable[[], None]) -> tuple[RankGenerator, Transport]:
        """Starts this rank's generator, and waits until all generators on this rank's device sleep.

        Args:
            meanwhile: what to do while processes start, once all of them are there. Ranks may meet in it.

        Raises:
            InputError: on all ranks; a generator does not start.
        """
        have_met = False

        def meet(problem: str = "") -> None:
            nonlocal have_met
            if not have_met:
                have_met = True
                self._agree(problem)
                meanwhile()

        started, problem = None, ""
        try:
            started = self._start(is_first=True, meanwhile=meet)
        except _AgreedError:
            raise
        except InputError as error:
            problem = str(error)
            meet(problem)
        meet()  # where there was no process to wait for
        try:
            self._agree(problem)
        except _AgreedError:
            if started is not None:
                started[0].close()
            raise
        assert started is not None
        return started

    def _agree(self, problem: str) -> None:
        """Raises InputError on all ranks if one of them has a problem. A collective."""
        problem = next((text for text in gather_objects(problem, self.world) if text), "")
        if problem:
            raise _AgreedError(problem)

    def _start(self, is_first: bool, meanwhile: Callable[[], None] = lambda: None) -> tuple[RankGenerator, Transport]:
        """Starts this rank's generator, which then sleeps if it shares memory."""
        generator, transport = make_generator(self.spec, self.handle, self.tokenizer, self.ranks, is_first, meanwhile)
        if self.spec.sleep_level and isinstance(generator, GeneratorProcess | VllmReplicas):
            try:
                generator.sleep(self.spec.sleep_level, PATIENCE.total_seconds())
            except WeightSyncError:
                generator.close()
                raise
        self.prepare(generator, transport)
        return generator, transport

    def _publish(self, publisher: Publisher) -> None:
        """Publishes the weights after so many optimizer steps. What cannot be written does not end the run."""
        step = self._tried_to_publish = self.engine.step
        self.published = None
        for attempt in range(1, PUBLISH_ATTEMPTS + 1):
            try:
                self.published = step, publisher.publish(step)
                return
            except WeightSyncError as problem:
                what = "trying again" if attempt < PUBLISH_ATTEMPTS else "the next one will be whole"
                if dist.get_rank() == 0:
                    print(
                        f"warning: weight_sync.publish: version {step} could not be written ({problem}); {what}",
                        flush=True,
                    )

    def _send(self) -> None:
        if not self.ranks.leaders:  # generators that have joined read what is published
            return
        self._policy_version_of[self.sync.version + 1] = self.policy_version
        try:
            self.sync.send()
        except WeightSyncError as problem:
            self.problem = self.problem or str(problem)  # what failed first is the cause

    def _free_unused(self) -> None:
        """Frees memory of the device that this process keeps for later: generators need it."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _replace(self) -> None:
        with self._noting:  # before it is closed: what that ends must not be held against the next one
            lost, self.generator, self.problem = self.generator, None, ""
        if lost is not None:
            lost.close()
        self.sync.disconnect()
        self._free_unused()
        try:
            self.generator, transport = self._start(is_first=False)
        except Exception as problem:
            self.problem = innermost(problem)
            others = without_generator(self.spec, self.handle, self.ranks)
            if others is not None:
                self.sync.reconnect(others)
        else:
            self.sync.reconnect(transport)
