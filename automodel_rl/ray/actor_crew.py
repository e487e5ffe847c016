"""A policy's ranks as Ray actors, driven by a program on any machine."""

import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from automodel_rl.policy.crew import FLEET, Crew, RemoteCall
from automodel_rl.policy.shares import Share
from automodel_rl.ray.policy_actor import ActorFailure

GRACE_SECONDS = 30.0
"""Longest wait for the other ranks after one has refused its input, and for ranks to close."""


class PolicyLostError(Exception):
    """A rank of the group failed or is gone, which ends the group."""


class ActorCrew(Crew):
    """Ranks as Ray actors.

    Args:
        ranks: the actors, in rank order.
        held: closed when a rank is lost, and at the end.

    Attributes:
        signals: always empty, as signals go to the program.
        is_intact: whether the ranks accept calls.
        host: address of the program's machine.
        data_ranks: data rank of each rank, None for an outsider; filled once models are loaded.
    """

    def __init__(self, ranks: Sequence[Any], held: contextlib.ExitStack):
        self._ranks, self._held = [*ranks], held
        self.signals, self.is_intact = [], True
        self.host = ray.util.get_node_ip_address()
        self.data_ranks: list[int | None] = []

    def call(self, call: RemoteCall, shares: Sequence[Share]) -> dict[int, Any]:
        """Calls a method on all ranks, as `Crew.call`, sending each rank only its own share.

        Raises:
            PolicyLostError: a rank failed or is gone, which ends the group.
        """
        self._check_open()
        sent, placed = ray.put(call), [ray.put(share) for share in shares]
        of_ranks = [None if rank is None or not shares else placed[rank] for rank in self.data_ranks]
        answers = self.call_actors("do", *zip(*((sent, share) for share in of_ranks), strict=True))
        return {rank: answer for rank, answer in enumerate(answers) if answer is not None}

    def call_actors(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """Calls a method of each actor. `arguments` are lists with one value per rank. Any failure ends the group,
        except a refusal by all ranks."""
        self._check_open()
        of_ranks = zip(*arguments, strict=True) if arguments else [()] * len(self._ranks)
        futures = [actor.answer.remote(method, *own) for actor, own in zip(self._ranks, of_ranks, strict=True)]
        waiting: list[Any] = [*futures]
        refusal: Exception | None = None
        while waiting:  # ranks that wait for a failed one do not answer
            done, waiting = ray.wait(waiting, timeout=None if refusal is None else GRACE_SECONDS)
            try:
                failures = [answer for answer in ray.get(done) if isinstance(answer, ActorFailure)]
            except RayError as error:
                failures = [ActorFailure(f"a node or its actor was lost: {' '.join(str(error).split())[:300]}")]
            if not done:
                failures = [ActorFailure(f"only some ranks refused their input: {refusal}")]
            for failure in failures:
                if failure.refusal is None:
                    self._close_group()
                    raise PolicyLostError(f"the group has ended because a rank failed: {failure.text}")
                refusal = failure.refusal
        if refusal is not None:
            raise refusal
        return ray.get(futures)

    def close(self, *, has_fleet: bool) -> None:
        """Ends the ranks, waiting at most `GRACE_SECONDS` for current work. With `has_fleet`, closes the generators
        first."""
        try:
            if self.is_intact and has_fleet:
                last = RemoteCall(FLEET, "close", (), has_rows=False, is_gathered=False)
                futures = [actor.answer.remote("do", last, None) for actor in self._ranks]
                ray.wait(futures, num_returns=len(futures), timeout=GRACE_SECONDS)
        finally:
            self._close_group()

    def _close_group(self) -> None:
        self._ranks, self.is_intact = [], False
        self._held.close()

    def _check_open(self) -> None:
        if not self.is_intact:
            raise PolicyLostError("the group is closed")
