"""Remote calls: a program in one process calls methods on all ranks. `TreeCrew` is the crew of a job that torchrun, our
launcher or Ray started; its program runs on rank 0.

A call travels from rank to rank in a binomial tree, and so do the answers: rank 0 talks to the ranks 1, 2, 4, 8 and so
on, each of which talks to those behind it. Each part of the tree gets the shares of its own data ranks and no others.
"""

import abc
import inspect
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from automodel_rl.errors import InputError, JobEndedError, RolloutError, TrainingDivergedError
from automodel_rl.launch.flight import flight
from automodel_rl.launch.stop_signal import StopSignal
from automodel_rl.parallel.host_collectives import TreePlace, gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.policy.shares import Share

REFUSALS = (InputError, RolloutError, TrainingDivergedError)
"""Errors that ranks raise without changing their state. They then take the next call; any other error ends them."""

POLICY, FLEET = "policy", "fleet"
"""Objects of a rank whose methods can be called: its part of the trained model, and its generator."""


def further_model(name: str) -> str:
    """The name of the object that is a rank's part of a further model."""
    return f"further model {name}"


@dataclass(frozen=True)
class RemoteCall:
    """A method that all ranks call.

    Attributes:
        target: the name of the object that has it, on every rank.
        method: its name.
        arguments: all but the rank's share of rows.
        has_rows: whether the rank's share of the rows is passed as the first argument (None on an outsider).
        is_gathered: whether the values of all ranks are returned; otherwise only rank 0's.
    """

    target: str
    method: str
    arguments: tuple[Any, ...]
    has_rows: bool
    is_gathered: bool

    def on(self, targets: Mapping[str, Any], share: Share | None) -> Any:
        """Calls the method of this rank's object."""
        rows = (share,) if self.has_rows else ()
        return getattr(targets[self.target], self.method)(*rows, *self.arguments)

    def check(self, targets: Mapping[str, Any]) -> None:
        """Raises AttributeError or TypeError if there is no such method, or it does not take the arguments."""
        method = getattr(targets[self.target], self.method)
        inspect.signature(method).bind(*((None,) if self.has_rows else ()), *self.arguments)


@dataclass(frozen=True)
class End:
    """No call comes after this.

    Attributes:
        error: what ended the program; None if it went well.
        value: what the program returned.
    """

    error: BaseException | None = None
    value: Any = None


FIRST_BYTES, LENGTH_BYTES = 4096, 8
"""Size of the first piece of every message, which most messages fit into, and of the length that it begins with."""


@dataclass
class Answers:
    """The answers of some ranks to a call.

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


class Crew(abc.ABC):
    """The ranks of a job, as a program uses them.

    Attributes:
        signals: names of the signals to stop that ranks got.
        is_intact: whether the ranks take calls. They do not after a call has failed.
        host: the name of the program's machine for the ranks; `localhost` if all are on this machine.
    """

    signals: list[str]
    is_intact: bool
    host: str

    @abc.abstractmethod
    def call(self, call: RemoteCall, shares: Sequence[Share]) -> dict[int, Any]:
        """Calls a method on all ranks.

        Args:
            call: the call.
            shares: the share of every data rank; none if it has no rows.

        Returns:
            Values by rank, without None: of all ranks if the call is gathered, else of rank 0.

        Raises:
            InputError, RolloutError, TrainingDivergedError: all ranks refuse the call alike, and are as they were.
            Exception: it failed, and the ranks can do no more.
        """

    def ask(self, target: str, method: str, *arguments: Any, shares: Sequence[Share] | None = None) -> Any:
        """Calls a method on all ranks and returns rank 0's answer; raises as `call`.

        Args:
            target: the name of the object that has the method, such as `POLICY`.
            method: its name.
            arguments: its arguments.
            shares: the share of every data rank, which ranks get as their first argument; None for a method without.
        """
        return self.call(RemoteCall(target, method, arguments, shares is not None, False), shares or ()).get(0)

    def gather(self, target: str, method: str, *arguments: Any, shares: Sequence[Share] | None = None) -> list[Any]:
        """Calls a method as `ask` does. Returns the answers of all ranks in their order, without those that are
        None."""
        answers = self.call(RemoteCall(target, method, arguments, shares is not None, True), shares or ())
        return [answer for _, answer in sorted(answers.items())]


class TreeCrew(Crew):
    """The ranks of this job. Each makes one. Rank 0 then leads, and the others follow.

    Args:
        layout: this rank's place among the ranks of the language model.
        targets: the objects of this rank whose methods are called, by name.
    """

    def __init__(self, layout: Layout, targets: Mapping[str, Any]):
        self.targets, self.group = targets, layout.world_control
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

    def call(self, call: RemoteCall, shares: Sequence[Share]) -> dict[int, Any]:
        """Calls a method on all ranks, as `Crew.call`. Rank 0 calls it."""
        if not self.is_intact:
            raise RuntimeError("the ranks take no more calls, for one has failed")
        call.check(self.targets)  # on one rank, before all would raise
        header, sent = b"", list[bytes]()
        if self.size > 1:  # before anything is sent: a loss may not pickle
            header, sent = _pickled((flight.where, call)), [_pickled(share) for share in shares]
        self.is_intact = False
        self._pass_on(header, sent)
        mine = self.data_ranks[0]
        answers = self._answers(call, shares[mine] if shares and mine is not None else None)
        self._collect(answers)
        self.signals += answers.signals
        self.is_intact = True  # all have answered, and wait for the next call
        if answers.refusals:
            raise min(answers.refusals.items())[1]
        return answers.values

    def end(self, error: BaseException | None = None, value: Any = None) -> None:
        """Lets the other ranks end, as this one does, unless a call has failed: they know that already."""
        if self.is_intact and self.size > 1:
            self.is_intact = False
            self._pass_on(_pickled(("", End(_sendable(error), _or_nothing(value)))), [])

    def follow(self, stop: StopSignal | None = None) -> Any:
        """Answers calls until the program ends. All ranks but rank 0 call it.

        Args:
            stop: tells of a signal to stop, which the program then learns of; None if that is not this rank's concern.

        Returns:
            What the program returned.

        Raises:
            Exception: what ended the program, or this rank's part of a call.
        """
        while True:
            with flight.top_phase("waiting for a call"):
                header, shares = self._receive(self._parent)
            where, call = pickle.loads(header)
            self._pass_on(header, shares)
            if isinstance(call, End):
                if call.error is not None:
                    raise call.error
                return call.value
            mine = self.data_ranks[self.rank]
            share = pickle.loads(shares[mine]) if shares and mine is not None else None
            with flight.top_phase(where or call.method):
                answers = self._answers(call, share)
            if stop is not None and stop.name is not None and not self._told:
                self._told = True
                answers.signals.append(stop.name)
            self._collect(answers)
            self._send(self._parent, _pickled(answers), {})

    def _answers(self, call: RemoteCall, share: Share | None) -> Answers:
        """This rank's answer."""
        try:
            value = call.on(self.targets, share)
        except REFUSALS as error:
            return Answers(refusals={self.rank: error})
        is_answer = value is not None and (call.is_gathered or self.rank == 0)
        return Answers({self.rank: value} if is_answer else {})

    def _collect(self, answers: Answers) -> None:
        """Adds the answers of all ranks behind this one."""
        for child in reversed(self._children):
            answers.add(pickle.loads(self._receive(child)[0]))

    def _pass_on(self, header: bytes, shares: Sequence[bytes] | dict[int, bytes]) -> None:
        """Sends a call to the ranks behind this one, each with what its part of the tree needs."""
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
