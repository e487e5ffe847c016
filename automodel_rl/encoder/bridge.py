"""The bridge between an encoder and a language model, each on its own mesh, beside the pipeline schedule.

Embeddings are sent to the language model, and their gradients back, microbatch by microbatch in order. Their number
may differ between microbatches.

A lane is a data rank. An encoder lane has the ranks that share the work on an image or clip; a language lane has the
first stage's ranks that share its microbatches. A lane's first rank is its leader. With fewer encoder lanes than
language lanes, an encoder lane serves several language lanes (fan out). With more, several serve one language lane
and divide its media (fan in).

Embeddings are broadcast in groups of one language lane and a serving encoder lane's leader; gradients are sent from
leader to leader. All ranks process lanes in the same order, which rules out deadlocks, also on ranks with both
components.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.parallel.host_collectives import combine
from automodel_rl.parallel.layout import Layout, own_group


@dataclass(frozen=True)
class Lane:
    """A language lane and the encoder lanes that serve it. This rank belongs to one of them.

    Attributes:
        language_ranks: the language lane's ranks, leader first.
        encoder_ranks: the ranks of each encoder lane, leader first.
        device_groups: the language ranks with each encoder leader, for tensors; None for a single rank.
        control: the language ranks and all encoder ranks, for objects; None for a single rank.
    """

    language_ranks: tuple[int, ...]
    encoder_ranks: tuple[tuple[int, ...], ...]
    device_groups: tuple[dist.ProcessGroup | None, ...]
    control: dist.ProcessGroup | None

    @property
    def language_leader(self) -> int:
        return self.language_ranks[0]

    @property
    def encoder_leaders(self) -> tuple[int, ...]:
        """The leader of each encoder lane."""
        return tuple(ranks[0] for ranks in self.encoder_ranks)


@dataclass(frozen=True)
class Transfer:
    """A tensor being sent or received. `tensor` must be kept alive until `work` is done; no work means nothing to
    wait for."""

    tensor: Tensor
    work: Any = None

    def wait(self) -> Tensor:
        """Returns the tensor, once it has been received or sent."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class LaneTransfers:
    """The transfers of one microbatch.

    Attributes:
        incoming: tensors for this rank's language lane, by sending encoder lane.
        outgoing: tensors from this rank for others.
    """

    incoming: list[Transfer] = field(default_factory=list)
    outgoing: list[Transfer] = field(default_factory=list)


Sizes = Mapping[int, Sequence[int]]
"""Number of embeddings from each encoder lane, by language lane."""


class Bridge:
    """This rank's end of the bridge. Every method is a collective of all ranks with the encoder or a first stage.

    Args:
        encoder, language: the layouts of both components; this rank may be an outsider of one.

    Attributes:
        lanes: this rank's lanes, by the data rank of the language lane.
        own_lane: this rank's language lane; None without a first stage.
        own_share: index of this rank's encoder lane among those that serve a language lane; None without the encoder.
    """

    def __init__(self, encoder: Layout, language: Layout, encoder_ranks: Sequence[int], language_ranks: Sequence[int]):
        self.encoder, self.language = encoder, language
        encoder_lanes = torch.tensor(encoder_ranks).reshape(-1, encoder.parallel.tp).tolist()
        sizes = language.parallel
        stages = torch.tensor(language_ranks).reshape(sizes.pp, sizes.num_data_ranks, sizes.cp * sizes.tp)
        language_lanes = stages[0].tolist()
        fan_in = max(1, len(encoder_lanes) // len(language_lanes))
        fan_out = max(1, len(language_lanes) // len(encoder_lanes))
        rank = dist.get_rank()
        self.lanes: dict[int, Lane] = {}
        self.own_share: int | None = None
        for number, of_lane in enumerate(language_lanes):
            first = number * fan_in if fan_in > 1 else number // fan_out
            serving = encoder_lanes[first : first + fan_in]
            everyone = sorted({*of_lane, *(r for ranks in serving for r in ranks)})
            device_groups = tuple(_group({*of_lane, leader}, None) for leader, *_ in serving)
            control = _group(set(everyone), "gloo")
            if rank in everyone:
                self.lanes[number] = Lane(tuple(of_lane), tuple(map(tuple, serving)), device_groups, control)
            self.own_share = next((n for n, ranks in enumerate(serving) if rank in ranks), self.own_share)
        self.own_lane = language.data_rank if language.has_first_stage else None

    @property
    def served_lanes(self) -> list[int]:
        """The language lanes that this rank's encoder lane serves; empty without the encoder."""
        rank = dist.get_rank()
        return [n for n, lane in self.lanes.items() if any(rank in ranks for ranks in lane.encoder_ranks)]

    def exchange(self, value: Any) -> dict[int, Any]:
        """Returns the objects of language lanes by lane, on their own ranks and on the encoder lanes that serve them.
        `value` is equal on all ranks of a language lane, and ignored elsewhere."""
        received = {}
        for number, lane in self.lanes.items():
            box = [value]
            if lane.control is not None:
                dist.broadcast_object_list(box, src=lane.language_leader, group=lane.control)
            received[number] = box[0]
        return received

    def any_encoder(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank with the encoder. A collective of those ranks only."""
        vote = torch.tensor(int(flag))
        combine(vote, self.encoder.stage_control, torch.maximum)
        return bool(vote)

    def to_language(self, chunks: Mapping[int, Tensor], sizes: Sizes, like: Tensor) -> LaneTransfers:
        """Starts sending a microbatch's embeddings to language lanes of this rank. Returns the transfers, among them
        to this rank a tensor [m, E] from each encoder lane that serves it.

        Args:
            chunks: embeddings [m, E] from this rank's encoder lane, by language lane; read on its leader only.
            sizes: for each of these lanes, the number of embeddings from each encoder lane. 0 sends no message.
            like: a tensor with the dtype, device and width of the embeddings.
        """
        rank, found = dist.get_rank(), LaneTransfers()
        for number in sizes:
            lane = self.lanes[number]
            for share, leader in enumerate(lane.encoder_leaders):
                if rank not in (*lane.language_ranks, leader):
                    continue
                size, group, work = sizes[number][share], lane.device_groups[share], None
                tensor = like.new_empty(size, like.shape[1])
                if rank == leader:
                    tensor = chunks[number].contiguous() if size else tensor
                if size and group is not None:
                    work = dist.broadcast(tensor, src=leader, group=group, async_op=True)
                (found.incoming if number == self.own_lane else found.outgoing).append(Transfer(tensor, work))
        return found

    def to_encoder(
        self, gradients: Sequence[Tensor], sizes: Sizes, like: Tensor
    ) -> tuple[dict[int, Tensor], LaneTransfers]:
        """Sends a microbatch's embedding gradients back, and waits for those of this rank's encoder lane. Returns
        them by language lane, and the transfers from this rank.

        Args:
            gradients: on a language lane's ranks, the gradient for each encoder lane, summed over the language lane.
            sizes, like: as for `to_language`.
        """
        rank, found, mine = dist.get_rank(), LaneTransfers(), {}
        for number in sizes:
            lane = self.lanes[number]
            for share, leader in enumerate(lane.encoder_leaders):
                size, group = sizes[number][share], lane.device_groups[share]
                if not size:
                    continue
                gradient = like.new_empty(size, like.shape[1])
                if rank == lane.language_leader:
                    gradient = gradients[share].contiguous()
                    if rank != leader:
                        found.outgoing.append(Transfer(gradient, dist.isend(gradient, dst=leader, group=group)))
                elif rank == leader:
                    dist.recv(gradient, src=lane.language_leader, group=group)
                if rank in lane.encoder_ranks[share]:
                    mine[number] = self._to_tp_peers(gradient)
        return mine, found

    def sum_over_language_lane(self, gradient: Tensor) -> None:
        """Sums a gradient in place: under context or sequence parallelism each rank has only its own tokens' part."""
        if self.language.cp_group is not None and gradient.numel():
            dist.all_reduce(gradient, group=self.language.cp_group)
        if self.language.parallel.sequence_parallel and gradient.numel():
            dist.all_reduce(gradient, group=self.language.tp_group)

    def _to_tp_peers(self, tensor: Tensor) -> Tensor:
        """Broadcasts the tensor of an encoder lane's leader to the lane."""
        if self.encoder.tp_group is not None:
            dist.broadcast(tensor, group=self.encoder.tp_group, group_src=0)
        return tensor


def _group(ranks: set[int], backend: str | None) -> dist.ProcessGroup | None:
    """Returns a process group of some ranks; None for a single rank."""
    return None if len(ranks) == 1 else own_group([sorted(ranks)], backend)
