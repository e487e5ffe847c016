"""Supervisor of a rank's generator: starts it, sends it weights, restarts it after failures, and closes it.

A generator may take turns with the trainer in using the GPU's memory, as configured by `memory.offload` and
`rollout.generator.sleep`:

    wake   optimizer moments to the host, wake vLLM's weights, weight sync, trainer's weights to the host, wake vLLM's
           cache
    sleep_and_restore   put vLLM to sleep, trainer's weights back to the GPU; moments return for the next optimizer step

`sleep_and_restore` is `sleep` and `offload.restore`, which are separate where something may come in between.
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
from automodel_rl.errors import InputError, WeightSyncError, describe_root_cause
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.generators.generator_ranks import GeneratorRanks
from automodel_rl.generators.make_generator import make_generator, transport_without_generator
from automodel_rl.generators.protocol import RankGenerator
from automodel_rl.generators.vllm_replicas import VllmReplicas
from automodel_rl.generators.vllm_servers import VllmServers
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.weight_sync.publisher import Publisher
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.transport import Transport

GENERATOR_TIMEOUT = datetime.timedelta(hours=12)
"""Timeout of ranks for a slow generator of another rank. A rank that dies is noticed at once."""


PUBLISH_ATTEMPTS = 2
"""Attempts to write a version, in case a file system is unavailable for a moment."""


class _AgreedError(InputError):
    """Error of one rank that is raised on all."""


class GeneratorSupervisor:
    """Owns this rank's generator and its weight syncs. Methods are collectives of all ranks.

    Args:
        prepare: called with every generator that starts and its transport, before it gets weights.
        meanwhile: called on every rank while the first generators start.

    Raises:
        InputError: the generator does not start.

    Attributes:
        generator: None after a failed restart.
        problem: why the generator cannot write; empty if it can. Cleared by `restart`.
        policy_version: the version sent last, or to be sent at the next `wake`.
        offload: moves the trainer's memory to the host during rollouts.
        published: the last published version and its hash; None if it could not be written.
        world: process group of all ranks with a long timeout, for waiting for generators.
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
        self.world = dist.new_group(backend="gloo", timeout=GENERATOR_TIMEOUT)
        self.ranks = GeneratorRanks.join(spec)
        self.offload = RolloutOffload(engine)
        self._is_awake = False
        self.published: tuple[int, str] | None = None
        self.problem, self._problem_lock = "", threading.Lock()
        self.offload.after_sync()  # the generator starts in the memory it will have later
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
        """Sends the model's current weights to all generators, or at `wake` if they sleep.

        Args:
            policy_version: the same on all ranks; 0 for weights that no step made.
            needed: oldest published version still being read, if any.
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
        """Prepares generators to write, in the memory shared with the trainer, until `sleep_and_restore`."""
        self._is_awake = True
        self.offload.before_sync()
        self._free_unused()
        self.ranks.barrier()  # the generator may use the GPUs of all of them
        if self.spec.sleep_level:
            self._ask(lambda generator: generator.wake("weights", self.spec.weight_sync.timeout))
            self._send()
        self.offload.after_sync()
        self._free_unused()
        self.ranks.barrier()
        if self.spec.sleep_level:
            self._ask(lambda generator: generator.wake("kv_cache", self.spec.weight_sync.timeout))

    def sleep_and_restore(self) -> None:
        """Returns the shared memory, if any, to the trainer, and restores its weights."""
        self.sleep()
        self.offload.restore()

    def sleep(self) -> None:
        """Puts generators to sleep, which frees the shared memory."""
        if not self._is_awake:
            return
        if self.spec.sleep_level:
            self._ask(lambda generator: generator.sleep(self.spec.sleep_level, GENERATOR_TIMEOUT.total_seconds()))
            if self.problem and self.generator is not None:
                self.generator.close()  # the trainer needs the memory
        self.ranks.barrier()
        self._is_awake = False

    def mark_lost(self, generator: RankGenerator | None, problem: str) -> None:
        """Records why a generator cannot write, unless it has been replaced. May be called from any thread."""
        with self._problem_lock:
            if generator is self.generator:
                self.problem = self.problem or problem

    def policy_versions(self, versions: tuple[int, int]) -> tuple[int, int]:
        """Maps the numbers of two weight syncs to policy versions. A sync after a failure resends the same version."""
        oldest, newest = versions
        return self._policy_version_of[oldest], self._policy_version_of[newest]

    def restart(self, failed: bool) -> None:
        """Restarts failed generators, this rank's if `failed`, and sends the newest weights to all. Remaining failures
        are in `problem`."""
        if failed:
            self._replace()
        else:
            self.sync.disconnect()  # the failed generator may be a member of this rank's links
            self._free_unused()
        # Waits: starting a generator may take longer than other collectives are allowed to.
        gather_objects("", self.world)
        was_awake = self._is_awake
        self.sleep_and_restore()
        if not self.spec.sleep_level:
            self._send()
        if was_awake:
            self.wake()

    def close(self) -> None:
        self.sync.disconnect()
        if self.generator is not None:
            self.generator.close()

    def _look_for_servers(self) -> None:
        """Reconnects before the next weight sync if servers have come or gone."""
        if not isinstance(self.spec.choice, VllmServersConfig):
            return
        have_changed = isinstance(self.generator, VllmServers) and self.generator.have_changed
        if any(gather_objects(have_changed, self.world)):
            self.sync.disconnect()

    def _ask(self, ask: Callable[[GeneratorProcess | VllmReplicas], None]) -> None:
        """Makes the generator sleep or wake, unless it has failed. A failure becomes `problem`."""
        if self.problem or not isinstance(self.generator, GeneratorProcess | VllmReplicas):  # only these share memory
            return
        try:
            ask(self.generator)
        except WeightSyncError as problem:
            self.problem = str(problem)

    def _start_with_others(self, meanwhile: Callable[[], None]) -> tuple[RankGenerator, Transport]:
        """Starts this rank's generator, and waits for all ranks. Raises InputError on all ranks if one does not start.

        Args:
            meanwhile: called while processes start, once all of them exist. May call collectives.
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
        meet()  # if there was no process to wait for
        try:
            self._agree(problem)
        except _AgreedError:
            if started is not None:
                started[0].close()
            raise
        assert started is not None
        return started

    def _agree(self, problem: str) -> None:
        """Raises InputError on all ranks if one has a problem. A collective."""
        problem = next((text for text in gather_objects(problem, self.world) if text), "")
        if problem:
            raise _AgreedError(problem)

    def _start(self, is_first: bool, meanwhile: Callable[[], None] = lambda: None) -> tuple[RankGenerator, Transport]:
        """Starts this rank's generator, and puts it to sleep if it shares memory."""
        generator, transport = make_generator(self.spec, self.handle, self.tokenizer, self.ranks, is_first, meanwhile)
        if self.spec.sleep_level and isinstance(generator, GeneratorProcess | VllmReplicas):
            try:
                generator.sleep(self.spec.sleep_level, GENERATOR_TIMEOUT.total_seconds())
            except WeightSyncError:
                generator.close()
                raise
        self.prepare(generator, transport)
        return generator, transport

    def _publish(self, publisher: Publisher) -> None:
        """Publishes the weights of the current optimizer step. A failure does not end the run."""
        step = self._tried_to_publish = self.engine.step
        self.published = None
        for attempt in range(1, PUBLISH_ATTEMPTS + 1):
            try:
                self.published = step, publisher.publish(step)
                return
            except WeightSyncError as problem:
                what = "trying again" if attempt < PUBLISH_ATTEMPTS else "the next version will be full"
                if dist.get_rank() == 0:
                    print(
                        f"warning: weight_sync.publish: version {step} could not be written ({problem}); {what}",
                        flush=True,
                    )

    def _send(self) -> None:
        if not self.ranks.leaders:  # joined generators read published versions
            return
        self._policy_version_of[self.sync.version + 1] = self.policy_version
        try:
            self.sync.send()
        except WeightSyncError as problem:
            self.problem = self.problem or str(problem)  # the first failure is the cause

    def _free_unused(self) -> None:
        """Releases torch's cached GPU memory, for generators."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _replace(self) -> None:
        with self._problem_lock:  # before closing it: errors caused by that must not count against the next one
            lost, self.generator, self.problem = self.generator, None, ""
        if lost is not None:
            lost.close()
        self.sync.disconnect()
        self._free_unused()
        try:
            self.generator, transport = self._start(is_first=False)
        except Exception as problem:
            self.problem = describe_root_cause(problem)
            others = transport_without_generator(self.spec, self.handle, self.ranks)
            if others is not None:
                self.sync.reconnect(others)
        else:
            self.sync.reconnect(transport)
