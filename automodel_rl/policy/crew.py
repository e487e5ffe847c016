"""Remote calls: a program in one process calls methods on all ranks. `TreeCrew` is for jobs started by torchrun, our
launcher or Ray; its program runs on rank 0.

Calls and answers travel along a binomial tree: rank 0 exchanges messages with ranks 1, 2, 4, 8 and so on, and each
of these with the ranks behind it. A subtree receives only the shares of its own data ranks.
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
from automodel_rl.parallel.host_collectives import TreeNode, gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.policy.shares import Share

REFUSALS = (InputError, RolloutError, TrainingDivergedError)
"""Errors that ranks raise without changing their state, after which they accept further calls. Any other error ends
them."""

POLICY, FLEET = "policy", "fleet"
"""Names of a rank's callable objects: its part of the trained model, and its generator."""


def further_model(name: str) -> str:
    """Returns the object name of a rank's part of a further model."""
    return f"further model {name}"


@dataclass(frozen=True)
class RemoteCall:
    """A method call on all ranks.

    Attributes:
        target: name of the object, the same on every rank.
        has_rows: whether the rank's share of the rows is passed as the first argument (None on an outsider).
        is_gathered: whether the values of all ranks are returned; otherwise only rank 0's.
    """

    target: str
    method: str
    arguments: tuple[Any, ...]
    has_rows: bool
    is_gathered: bool

    def on(self, targets: Mapping[str, Any], share: Share | None) -> Any:
        rows = (share,) if self.has_rows else ()
        return getattr(targets[self.target], self.method)(*rows, *self.arguments)

    def check(self, targets: Mapping[str, Any]) -> None:
        """Raises AttributeError or TypeError if the method does not exist or does not accept the arguments."""
        method = getattr(targets[self.target], self.method)
        inspect.signature(method).bind(*((None,) if self.has_rows else ()), *self.arguments)


@dataclass(frozen=True)
class End:
    """The last message to a rank.

    Attributes:
        error: the error that ended the program; None if it succeeded.
        value: the program's result.
    """

    error: BaseException | None = None
    value: Any = None


FIRST_BYTES, LENGTH_BYTES = 4096, 8
"""Size of each message's first piece, which most messages fit into, and of the length at its start."""


@dataclass
class Answers:
    """Answers of some ranks to a call.

    Attributes:
        values, refusals: by rank.
        signals: names of stop signals that ranks received.
    """

    values: dict[int, Any] = field(default_factory=dict)
    refusals: dict[int, Exception] = field(default_factory=dict)
    signals: list[str] = field(default_factory=list)

    def add(self, others: "Answers") -> None:
        self.values |= others.values
        self.refusals |= others.refusals
        self.signals += others.signals


class Crew(abc.ABC):
    """The ranks of a job, as a program uses them.

    Attributes:
        signals: names of stop signals that ranks received.
        is_intact: whether the ranks accept calls. They do not after a call has failed.
        host: name of the program's machine for the ranks; `localhost` if all are on this machine.
    """

    signals: list[str]
    is_intact: bool
    host: str

    @abc.abstractmethod
    def call(self, call: RemoteCall, shares: Sequence[Share]) -> dict[int, Any]:
        """Calls a method on all ranks.

        Args:
            shares: the share of every data rank; empty for a call without rows.

        Returns:
            Values by rank, without None: of all ranks if the call is gathered, else of rank 0.

        Raises:
            InputError, RolloutError, TrainingDivergedError: all ranks refuse the call alike and are unchanged.
            Exception: the call failed, and the ranks accept no more.
        """

    def ask(self, target: str, method: str, *arguments: Any, shares: Sequence[Share] | None = None) -> Any:
        """Calls a method on all ranks and returns rank 0's answer. Raises as `call`.

        Args:
            target: name of the object that has the method, such as `POLICY`.
            shares: the share of every data rank, passed to ranks as the first argument; None for a method without
                rows.
        """
        return self.call(RemoteCall(target, method, arguments, shares is not None, False), shares or ()).get(0)

    def gather(self, target: str, method: str, *arguments: Any, shares: Sequence[Share] | None = None) -> list[Any]:
        """Calls a method as `ask` does. Returns the answers of all ranks in rank order, without None."""
        answers = self.call(RemoteCall(target, method, arguments, shares is not None, True), shares or ())
        return [answer for _, answer in sorted(answers.items())]


class TreeCrew(Crew):
    """The ranks of this job. Each rank constructs one; then rank 0 drives, and the others follow.

    Args:
        targets: this rank's objects for remote calls, by name.
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
        self._has_reported_stop = False

    @property
    def _children(self) -> list[int]:
        """This rank's children in the tree, largest subtree first."""
        return [*reversed(TreeNode.of(self.rank, self.size).children)]

    def _behind(self, child: int) -> range:
        """The ranks in a child's subtree."""
        return range(child, min(child + (child - self.rank), self.size))

    @property
    def _parent(self) -> int:
        return self.rank & (self.rank - 1)

    def call(self, call: RemoteCall, shares: Sequence[Share]) -> dict[int, Any]:
        """Calls a method on all ranks, as `Crew.call`. For rank 0 only."""
        if not self.is_intact:
            raise RuntimeError("the ranks accept no more calls because one has failed")
        call.check(self.targets)  # here, before it would raise on every rank
        header, sent = b"", list[bytes]()
        if self.size > 1:  # before sending anything: a loss may fail to pickle
            header, sent = _pickled((flight.where, call)), [_pickled(share) for share in shares]
        self.is_intact = False
        self._pass_on(header, sent)
        mine = self.data_ranks[0]
        answers = self._answers(call, shares[mine] if shares and mine is not None else None)
        self._collect(answers)
        self.signals += answers.signals
        self.is_intact = True  # all have answered and wait for the next call
        if answers.refusals:
            raise min(answers.refusals.items())[1]
        return answers.values

    def end(self, error: BaseException | None = None, value: Any = None) -> None:
        """Ends the other ranks, like this one, unless a failed call has already done so."""
        if self.is_intact and self.size > 1:
            self.is_intact = False
            self._pass_on(_pickled(("", End(_sendable(error), _or_nothing(value)))), [])

    def follow(self, stop: StopSignal | None = None) -> Any:
        """Serves calls until the program ends, and returns the program's result. For all ranks but rank 0.

        Args:
            stop: stop signal of this rank, to report to the program; None to ignore.

        Raises:
            Exception: the error that ended the program, or this rank's part of a call.
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
            if stop is not None and stop.name is not None and not self._has_reported_stop:
                self._has_reported_stop = True
                answers.signals.append(stop.name)
            self._collect(answers)
            self._send(self._parent, _pickled(answers), {})

    def _answers(self, call: RemoteCall, share: Share | None) -> Answers:
        try:
            value = call.on(self.targets, share)
        except REFUSALS as error:
            return Answers(refusals={self.rank: error})
        is_answer = value is not None and (call.is_gathered or self.rank == 0)
        return Answers({self.rank: value} if is_answer else {})

    def _collect(self, answers: Answers) -> None:
        for child in reversed(self._children):
            answers.add(pickle.loads(self._receive(child)[0]))

    def _pass_on(self, header: bytes, shares: Sequence[bytes] | dict[int, bytes]) -> None:
        """Sends a call to the children, each with the shares that its subtree needs."""
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
    """Pickles a value; functions from a program's own file include their code."""
    stream = io.BytesIO()
    cloudpickle.Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def _sendable(error: BaseException | None) -> BaseException | None:
    """Returns the error for other ranks: itself if it explains all, else a lost-peer error, so that rank 0's counts
    as the cause."""
    if error is None or isinstance(error, (InputError, JobEndedError)):
        return error
    return RuntimeError(f"another rank failed, rank 0: {type(error).__name__}: {error}")


def _or_nothing(value: Any) -> Any:
    """Returns the program's result if it can be pickled, else None."""
    try:
        _pickled(value)
    except Exception:  # pickling may raise anything
        return None
    return value
