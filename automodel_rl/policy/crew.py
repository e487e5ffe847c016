"""The ranks that do a program's jobs. `TreeCrew` are those of a job of torchrun, our launcher or Ray, which a program
on rank 0 leads.

A job goes from rank to rank in a binomial tree, and so do the answers: rank 0 talks to the ranks 1, 2, 4, 8 and so on,
each of which talks to those behind it. Each part of the tree gets the shares of its own data ranks and no others.
"""

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import torch
import torch.distributed as dist

from automodel_rl.errors import InputError, JobEndedError, RolloutError, TrainingDivergedError
from automodel_rl.launch.flight import flight
from automodel_rl.launch.stop_signal import StopSignal
from automodel_rl.parallel.host_collectives import TreePlace, gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.policy.jobs import End, Job, OfFurtherModel
from automodel_rl.policy.shares import Share

REFUSALS = (InputError, RolloutError, TrainingDivergedError)
"""What ranks raise alike and then are as they were, ready for the next job. After any other error they end."""


FIRST_BYTES, LENGTH_BYTES = 4096, 8
"""Size of the first piece of every message, which most messages fit into, and of the length that it begins with."""


@dataclass
class Answers:
    """The answers of some ranks to a job.

    Attributes:
        values: the values by rank.
        refusals: the refusals by rank.
        signals: names of signals to stop that ranks got.
    """

    values: dict[int, Any] = field(default_factory=dict)
    refusals: dict[int, Exception] = field(default_factory=dict)
    signals: list[str] = field(default_factory=list)

    def add(self, others: "Answers") -> None:
        """Adds the answers of other ranks."""
        self.values |= others.values
        self.refusals |= others.refusals
        self.signals += others.signals


class Crew(Protocol):
    """The ranks of a model, as a program uses them.

    Attributes:
        signals: names of the signals to stop that ranks got.
        is_intact: whether the ranks take jobs. They do not after a job has failed.
        host: the name of the program's machine for the ranks; `localhost` if all are on this machine.
    """

    @property
    def signals(self) -> list[str]: ...
    @property
    def is_intact(self) -> bool: ...
    @property
    def host(self) -> str: ...

    def ask(self, job: Job, shares: Sequence[Share] = ()) -> list[Any]:
        """Lets all ranks do a job.

        Args:
            job: the job.
            shares: the share of every data rank; none for a job without rows.

        Returns:
            The answers that count, those of lower ranks first: rank 0's alone, or those of all ranks that gave one.

        Raises:
            InputError, RolloutError, TrainingDivergedError: all ranks refuse the job alike, and are as they were.
            Exception: it failed, and the ranks can do no more.
        """
        ...


class TreeCrew:
    """The ranks of this job. Each makes one. Rank 0 then leads, and the others follow.

    Args:
        layout: this rank's place among the ranks of the language model.
        do: does a job with this rank's share, on every rank.

    Attributes:
        signals: on rank 0, names of the signals to stop that ranks got.
        is_intact: on rank 0, whether the ranks take jobs. They do not after a job has failed.
        host: the name of rank 0's machine for the other ranks.
    """

    def __init__(self, layout: Layout, do: Callable[[Job, Share | None], Any]):
        self.do, self.group = do, layout.world_control
        self.rank, self.size = self.group.rank(), self.group.size()
        own = None if layout.is_outsider else layout.data_rank
        self.data_ranks: list[int | None] = gather_objects(own, self.group)
        self.signals: list[str] = []
        self.is_intact = True
        on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.host = "localhost" if on_machine == self.size else os.environ["MASTER_ADDR"]
        self._told = False

    @property
    def _children(self) -> list[int]:
        """The ranks behind this one that it talks to, those with most ranks behind them first."""
        return [*reversed(TreePlace.of(self.rank, self.size).children)]

    def _behind(self, child: int) -> range:
        """The ranks that a child stands for."""
        return range(child, min(child + (child - self.rank), self.size))

    @property
    def _parent(self) -> int:
        return self.rank & (self.rank - 1)

    def ask(self, job: Job, shares: Sequence[Share] = ()) -> list[Any]:
        """Lets all ranks do a job, as `Crew.ask`. Rank 0 calls it."""
        if not self.is_intact:
            raise RuntimeError("the ranks take no more jobs, for one has failed")
        header, sent = b"", list[bytes]()
        if self.size > 1:  # before anything is sent: a loss may not pickle
            header, sent = _pickled((flight.where, job)), [_pickled(share) for share in shares]
        self.is_intact = False
        self._pass_on(header, sent)
        mine = self.data_ranks[0]
        answers = self._answers(job, shares[mine] if shares and mine is not None else None)
        self._collect(answers)
        self.signals += answers.signals
        self.is_intact = True  # all have answered, and wait for the next job
        if answers.refusals:
            raise min(answers.refusals.items())[1]
        return those_that_count(job, answers.values)

    def end(self, error: BaseException | None = None, value: Any = None) -> None:
        """Lets the other ranks end, as this one does, unless a job has failed: they know that already."""
        if self.is_intact and self.size > 1:
            self.is_intact = False
            self._pass_on(_pickled(("", End(_sendable(error), _or_nothing(value)))), [])

    def follow(self, stop: StopSignal | None = None) -> Any:
        """Does jobs until the program ends. All ranks but rank 0 call it.

        Args:
            stop: tells of a signal to stop, which the program then learns of; None if that is not this rank's concern.

        Returns:
            What the program returned.

        Raises:
            Exception: what ended the program, or this rank's part of a job.
        """
        while True:
            with flight.top_phase("waiting for a job"):
                header, shares = self._receive(self._parent)
            where, job = pickle.loads(header)
            self._pass_on(header, shares)
            if isinstance(job, End):
                if job.error is not None:
                    raise job.error
                return job.value
            mine = self.data_ranks[self.rank]
            share = pickle.loads(shares[mine]) if shares and mine is not None else None
            with flight.top_phase(where or type(job).__name__):
                answers = self._answers(job, share)
            if stop is not None and stop.name is not None and not self._told:
                self._told = True
                answers.signals.append(stop.name)
            self._collect(answers)
            self._send(self._parent, _pickled(answers), {})

    def _answers(self, job: Job, share: Share | None) -> Answers:
        """This rank's answer."""
        try:
            value = self.do(job, share)
        except REFUSALS as error:
            return Answers(refusals={self.rank: error})
        counts = job.answered_by == "all" if self.rank else True
        return Answers({self.rank: value} if counts and value is not None else {})

    def _collect(self, answers: Answers) -> None:
        """Adds the answers of all ranks behind this one."""
        for child in reversed(self._children):
            answers.add(pickle.loads(self._receive(child)[0]))

    def _pass_on(self, header: bytes, shares: Sequence[bytes] | dict[int, bytes]) -> None:
        """Sends a job to the ranks behind this one, each with what its part of the tree needs."""
        of_ranks = shares if isinstance(shares, dict) else dict(enumerate(shares))
        for child in self._children:
            needed = {self.data_ranks[rank] for rank in self._behind(child)}
            self._send(child, header, {rank: share for rank, share in of_ranks.items() if rank in needed})

    def _send(self, rank: int, header: bytes, shares: dict[int, bytes]) -> None:
        stream = io.BytesIO()
        stream.write(bytes(LENGTH_BYTES))
        pickle.Pickler(stream, protocol=5).dump((header, shares))
        length = stream.tell()
        stream.write(bytes(max(0, FIRST_BYTES - length)))
        message = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)
        message[:LENGTH_BYTES] = torch.frombuffer(bytearray(length.to_bytes(LENGTH_BYTES)), dtype=torch.uint8)
        dist.send(message[:FIRST_BYTES], rank, group=self.group)
        if length > FIRST_BYTES:
            dist.send(message[FIRST_BYTES:], rank, group=self.group)

    def _receive(self, rank: int) -> tuple[bytes, dict[int, bytes]]:
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        dist.recv(first, rank, group=self.group)
        length = int.from_bytes(first[:LENGTH_BYTES].numpy().tobytes())
        message = first
        if length > FIRST_BYTES:
            message = torch.empty(length, dtype=torch.uint8)
            message[:FIRST_BYTES] = first
            dist.recv(message[FIRST_BYTES:], rank, group=self.group)
        header, shares = pickle.loads(message[LENGTH_BYTES:length].numpy().data)
        return header, shares


class FurtherCrew:
    """The ranks of a further model, which are those of another crew, with the same data ranks.

    Args:
        crew: the crew of the trained model.
        name: the further model's name.
    """

    def __init__(self, crew: Crew, name: str):
        self.crew, self.name = crew, name

    @property
    def signals(self) -> list[str]:
        """Names of the signals to stop that ranks got."""
        return self.crew.signals

    @property
    def is_intact(self) -> bool:
        """Whether the ranks take jobs."""
        return self.crew.is_intact

    @property
    def host(self) -> str:
        """The name of the program's machine for the ranks."""
        return self.crew.host

    def ask(self, job: Job, shares: Sequence[Share] = ()) -> list[Any]:
        """Lets all ranks do a job of the further model, as `Crew.ask`."""
        return self.crew.ask(OfFurtherModel(self.name, job), shares)


def those_that_count(job: Job, values: Mapping[int, Any]) -> list[Any]:
    """The answers to a job that count, given those of all ranks that gave one."""
    if job.answered_by == "first":
        return [values.get(0)]
    return [value for _, value in sorted(values.items()) if value is not None]


def _pickled(value: Any) -> bytes:
    """A value for another process; functions of a program's own file go with their code."""
    stream = io.BytesIO()
    cloudpickle.Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def _sendable(error: BaseException | None) -> BaseException | None:
    """The error as other ranks raise it: itself if it says all, else that of a peer, so that rank 0's is the cause."""
    if error is None or isinstance(error, (InputError, JobEndedError)):
        return error
    return RuntimeError(f"another rank failed, rank 0: {type(error).__name__}: {error}")


def _or_nothing(value: Any) -> Any:
    """What a program returned, if other ranks can have it, too."""
    try:
        _pickled(value)
    except Exception:  # whatever pickling raises
        return None
    return value
