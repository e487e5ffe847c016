"""Fleet: the generators of a policy, as a program uses them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.generator_messages import Request
from automodel_rl.generators import jobs
from automodel_rl.generators.protocol import Completion
from automodel_rl.policy.crew import Crew


class Fleet:
    """The generators of a policy. A program calls its methods; nothing in it is a collective.

    Args:
        crew: the ranks, which lead the generators.

    Attributes:
        policy_version: the policy version that generators got last, or get when they wake, from 1 on.
        warning: a line about memory that generators cannot use although the trainer lends it; empty if there is none.

    Example:
        >>> def program(policy, fleet, run):
        ...     policy.begin()
        ...     fleet.start(run.config.generator_spec)
        ...     fleet.sync()
        ...     return fleet.policy_version
        >>> run_program(program, load_config("my_grpo.yaml"))  # doctest: +ELLIPSIS
        loading ...
        1
    """

    def __init__(self, crew: Crew):
        self.crew = crew
        self.policy_version = 0
        self.warning = ""
        self.spec: GeneratorSpec

    def start(self, spec: GeneratorSpec) -> None:
        """Starts all generators.

        Args:
            spec: the generator that each rank asks for.

        Raises:
            InputError: a generator does not start.
        """
        self.spec = spec
        self.crew.ask(jobs.StartGenerators(spec))

    def sync(self) -> None:
        """Gives all generators the weights that the policy has now, as the next policy version. Those that sleep get
        them when they wake."""
        self.policy_version += 1
        self.crew.ask(jobs.SyncWeights(is_new=True))

    def sync_again(self) -> None:
        """Gives all generators the weights that the policy has now, as the same policy version as before."""
        self.crew.ask(jobs.SyncWeights(is_new=False))

    @contextlib.contextmanager
    def awake(self, time: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()) -> Iterator[None]:
        """Lets generators write in this block, in the memory that they share with the trainer, if they do. After it
        the trainer's weights may still be on the host.

        Args:
            time: a block that measures how long the phase with this name takes.
        """
        if not self.spec.shares_memory:
            yield
            return
        try:
            with time("wake"):
                self.crew.ask(jobs.Wake())
            yield
        finally:
            if self.crew.is_intact:
                with time("sleep"):
                    self.warning = self.crew.ask(jobs.Sleep())[0]

    def restore(self) -> None:
        """Brings the trainer's weights back, if they are on the host."""
        if self.spec.shares_memory:
            self.crew.ask(jobs.Restore())

    def write(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions by the generators, with the weights of the last `sync`.

        Args:
            requests: the completions to write, which are dealt to the generators.

        Raises:
            RolloutError: a generator cannot write.
        """
        written: dict[int, Completion] = {}
        try:
            with self.awake():
                answers = self.crew.ask(jobs.Write([*requests]))
        finally:
            if self.crew.is_intact:
                self.restore()
        for answer in answers:
            written |= answer
        return [written[place] for place in range(len(requests))]

    def write_alike(self, requests: Sequence[Request]) -> dict[int, list[Completion]]:
        """The same completions by every generator, by the rank that leads it; none by one that has failed.

        Args:
            requests: the completions to write.
        """
        return dict(self.crew.ask(jobs.WriteAlike([*requests])))

    def restart(self) -> None:
        """Starts generators again that have failed. All get the weights that the policy has now, as the same policy
        version as before."""
        self.crew.ask(jobs.RestartGenerators())

    def close(self) -> None:
        """Ends all generators."""
        self.crew.ask(jobs.CloseGenerators())
