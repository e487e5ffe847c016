"""The generator's side of a weight sync: writes buckets to its tensors, and keeps their version."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from automodel_rl.compat.operations import copy_each
from automodel_rl.errors import WeightSyncError
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.checksum import checksum


class Receiver:
    """Writes buckets to a generator's tensors.

    Args:
        homes: the generator's tensors by Hugging Face name, contiguous.

    Attributes:
        plans: set by `agree`.
        version: of the weights. None before the first weight sync, during one, and after a failed one.
    """

    def __init__(self, homes: Mapping[str, Tensor]):
        self.homes = {name: home.detach() for name, home in homes.items()}
        self.version: int | None = None
        self.plans: list[Plan] = []
        self._targets: dict[tuple[int, int], list[Tensor]] = {}

    def agree(self, plans: Sequence[Plan]) -> None:
        """Checks and keeps the senders' plans. Raises WeightSyncError if names, shapes or dtypes differ from the
        generator's."""
        sent = {spec.name: spec for plan in plans for spec in plan.tensors}
        twice = len([spec for plan in plans for spec in plan.tensors]) - len(sent)
        if twice:
            raise WeightSyncError(f"the trainer sends {twice} tensors twice")
        for name, spec in sent.items():
            home = self.homes.get(name)
            if home is None:
                raise WeightSyncError(f"the trainer sends {spec}, which the generator does not have")
            if (tuple(home.shape), home.dtype) != (spec.shape, spec.dtype):
                kind = f"{list(home.shape)} {str(home.dtype).removeprefix('torch.')}"
                raise WeightSyncError(f"the trainer sends {spec}, but the generator's is {kind}")
        missing = self.homes.keys() - sent.keys()
        if missing:
            raise WeightSyncError(
                f"the trainer does not send {min(missing)} and {len(missing) - 1} more tensors of the generator"
            )
        self.plans = list(plans)
        self._targets = {
            (sender, number): [
                self.homes[plan.tensors[chunk.tensor].name].view(-1)[chunk.start : chunk.start + chunk.count]
                for chunk in bucket.chunks
            ]
            for sender, plan in enumerate(plans)
            for number, bucket in enumerate(plan.buckets)
        }

    def begin(self) -> None:
        self.version = None

    @torch.no_grad()
    def load(self, sender: int, number: int, buffer: Tensor) -> None:
        """Copies a bucket to its tensors, on the current stream."""
        bucket = self.plans[sender].buckets[number]
        if bucket.chunks:
            elements = bucket.elements(buffer)
            stretches = [elements[chunk.offset : chunk.offset + chunk.count] for chunk in bucket.chunks]
            copy_each(self._targets[sender, number], stretches)

    def commit(self, version: int) -> None:
        self.version = version

    def complete_version(self) -> int:
        """Returns the version of the weights. Raises WeightSyncError if they have none."""
        if self.version is None:
            raise WeightSyncError(
                "the generator has no complete weights: none received yet, or a weight sync was interrupted; it "
                "generates after the next complete one"
            )
        return self.version

    def checksums(self) -> dict[str, int]:
        return {name: int(checksum(home)) for name, home in self.homes.items()}


def in_turn(plans: Sequence[Plan], *, frozen: bool) -> list[tuple[int, int]]:
    """Returns pairs (sender, bucket) in the order of receiving. It alternates between senders, so that one stage packs
    while another one's bucket is sent."""
    of_senders = [
        [(sender, number) for number, bucket in enumerate(plan.buckets) if frozen or not bucket.is_frozen]
        for sender, plan in enumerate(plans)
    ]
    return [pair for row in itertools.zip_longest(*of_senders) for pair in row if pair is not None]
