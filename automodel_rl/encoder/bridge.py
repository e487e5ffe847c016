"""The bridge between an encoder and a language model, each on a mesh of its own, beside the pipeline schedule.

The encoder's embeddings of media go over the bridge to the language model, and their gradients come back: those of a
whole step at once where ranks have both components, microbatch by microbatch where they have one. How many there are
may differ from microbatch to microbatch.

A lane is a data rank. An encoder lane has the ranks that share the encoder's work on an image or clip. A language lane
has those ranks of the first stage that share its microbatches. The leader of a lane, its first rank, sends for it.

The numbers of lanes decide which serve which. With fewer encoder lanes than language lanes, an encoder lane serves
several language lanes (fan out). With more, several encoder lanes serve one language lane and divide its media
(fan in).

Embeddings are broadcast, each time in a group of one language lane and the leader of an encoder lane that serves it.
All ranks go through groups and senders in the same order, so they never wait for each other in a circle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.parallel.layout import Layout, own_group


@dataclass(frozen=True)
class Lane:
    """A language lane and the encoder lanes that serve it. This rank belongs to one of them.

    Attributes:
        language_ranks: the ranks of the language lane, its leader first.
        encoder_ranks: all ranks of each encoder lane that serves it, its leader first.
        device_groups: the language ranks with each of the encoder leaders, for tensors; None if that is one rank.
        control: the language ranks and all encoder ranks, for objects; None if that is one rank.
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
        """The leader of each encoder lane that serves it."""
        return tuple(ranks[0] for ranks in self.encoder_ranks)


class Bridge:
    """This rank's end of the bridge. Every method is a collective of all ranks with the encoder or a first stage.

    Args:
        encoder, language: the layouts of both components; this rank may be an outsider of one.
        encoder_ranks, language_ranks: the ranks of the job that have them.

    Attributes:
        lanes: the lanes that this rank belongs to, by the data rank of the language lane.
        own_lane: the language lane that this rank is in; None on a rank without a first stage.
        own_share: the place of this rank's encoder lane among those that serve a language lane; None on a rank without
            the encoder.
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
        """The language lanes that this rank's encoder lane serves; none on a rank without the encoder."""
        rank = dist.get_rank()
        return [n for n, lane in self.lanes.items() if any(rank in ranks for ranks in lane.encoder_ranks)]

    def exchange(self, value: Any) -> dict[int, Any]:
        """The objects of language lanes, on their own ranks and on the encoder lanes that serve them, by lane.

        Args:
            value: the object of this rank's language lane, equal on all its ranks; not read on other ranks.
        """
        received = {}
        for number, lane in self.lanes.items():
            box = [value]
            if lane.control is not None:
                dist.broadcast_object_list(box, src=lane.language_leader, group=lane.control)
            received[number] = box[0]
        return received

    def any_encoder(self, flag: bool) -> bool:
        """Whether the flag is set on any rank with the encoder. A collective of those ranks alone."""
        vote = torch.tensor(int(flag))
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.encoder.stage_control)
        return bool(vote)

    def to_language(self, embeddings: dict[int, Tensor], sizes: dict[int, list[int]], like: Tensor) -> list[Tensor]:
        """Sends embeddings to every language lane.

        Args:
            embeddings: [m, E] for each language lane that this rank's encoder lane serves; read on its leader only.
            sizes: for each language lane, how many embeddings come from each encoder lane that serves it.
            like: a tensor with the dtype, device and width of the embeddings.

        Returns:
            A tensor [m, E] from each encoder lane that serves this rank's language lane; empty on ranks without a first
            stage.
        """
        received = []
        for number, lane in self.lanes.items():
            for share, leader in enumerate(lane.encoder_leaders):
                sends = share == self.own_share and dist.get_rank() in lane.encoder_leaders
                tensor = embeddings.get(number) if sends else None
                tensor = self._broadcast(tensor, sizes[number][share], like, leader, lane, share)
                if number == self.own_lane and tensor is not None:
                    received.append(tensor)
        return received

    def to_encoder(self, gradients: list[Tensor], sizes: dict[int, list[int]], like: Tensor) -> dict[int, Tensor]:
        """Sends the gradients of what `to_language` brought back to all ranks of the encoder lanes.

        Args:
            gradients: this rank's summand of the gradient of each tensor that `to_language` returned.
            sizes, like: what `to_language` got.

        Returns:
            The gradients of this rank's encoder lane, by language lane; empty on ranks without the encoder.
        """
        for gradient in gradients:
            self.sum_over_language_lane(gradient)
        mine: dict[int, Tensor] = {}
        for number, lane in self.lanes.items():
            for share in range(len(lane.encoder_leaders)):
                tensor = gradients[share] if number == self.own_lane else None
                tensor = self._broadcast(tensor, sizes[number][share], like, lane.language_leader, lane, share)
                if share == self.own_share and number in self.served_lanes:
                    mine[number] = self._to_tp_peers(tensor, sizes[number][share], like)
        return mine

    def send_embeddings(self, lane: int, embeddings: Tensor) -> "Transfer":
        """Starts to send embeddings [m, E] to a language lane, from a rank of an encoder lane that serves it.
        Each `send_embeddings` meets one `receive_embeddings`, in order.
        """
        assert self.own_share is not None
        leader, group = self.lanes[lane].encoder_leaders[self.own_share], self.lanes[lane].device_groups[self.own_share]
        if dist.get_rank() != leader:
            return Transfer(embeddings)
        return Transfer(embeddings, dist.broadcast(embeddings, src=leader, group=group, async_op=True))

    def receive_embeddings(self, share: int, size: int, like: Tensor) -> "Transfer":
        """Starts to receive embeddings [size, E] on all ranks of this rank's language lane.

        Args:
            share: the number of the sending encoder lane, among the encoder lanes that send to this language lane.
            size: how many there are; 0 is no message.
            like: a tensor with the dtype, device and width of the embeddings.
        """
        assert self.own_lane is not None
        lane, buffer = self.lanes[self.own_lane], like.new_empty(size, like.shape[1])
        if not size:
            return Transfer(buffer)
        source, group = lane.encoder_leaders[share], lane.device_groups[share]
        return Transfer(buffer, dist.broadcast(buffer, src=source, group=group, async_op=True))

    def return_gradient(self, share: int, gradient: Tensor) -> "Transfer":
        """Starts to send the gradient of embeddings back, once it is summed over the language lane.

        Args:
            share: the place of the encoder lane that has made them among those that serve this rank's lane.
            gradient: [m, E]; an empty one is no message.
        """
        assert self.own_lane is not None
        lane = self.lanes[self.own_lane]
        if dist.get_rank() != lane.language_leader or not len(gradient):
            return Transfer(gradient)
        gradient = gradient.contiguous()
        message = dist.isend(gradient, dst=lane.encoder_leaders[share], group=lane.device_groups[share])
        return Transfer(gradient, message)

    def take_gradient(self, lane: int, size: int, like: Tensor) -> Tensor:
        """Waits for a gradient [size, E] that a language lane returns, on all ranks of the encoder lane.

        Args:
            lane: the language lane.
            size: how many embeddings it is of, at least 1.
            like: a tensor with the dtype, device and width of the embeddings.
        """
        assert self.own_share is not None
        serving = self.lanes[lane]
        gradient = like.new_empty(size, like.shape[1])
        if dist.get_rank() == serving.encoder_leaders[self.own_share]:
            dist.recv(gradient, src=serving.language_leader, group=serving.device_groups[self.own_share])
        return self._to_tp_peers(gradient, size, like)

    def _broadcast(
        self, tensor: Tensor | None, size: int, like: Tensor, source: int, lane: Lane, share: int
    ) -> Tensor | None:
        """The tensor [size, E] of one rank, on the language ranks and the leader of an encoder lane; None elsewhere."""
        if dist.get_rank() not in (*lane.language_ranks, lane.encoder_leaders[share]):
            return None
        if dist.get_rank() != source:
            tensor = like.new_empty(size, like.shape[1])
        assert tensor is not None
        tensor = tensor.contiguous()
        if lane.device_groups[share] is not None and size:
            dist.broadcast(tensor, src=source, group=lane.device_groups[share])
        return tensor

    def sum_over_language_lane(self, gradient: Tensor) -> None:
        """Sums a gradient in place. Under context or sequence parallelism a rank has that of its own tokens only."""
        if self.language.cp_group is not None and gradient.numel():
            dist.all_reduce(gradient, group=self.language.cp_group)
        if self.language.parallel.sequence_parallel and gradient.numel():
            dist.all_reduce(gradient, group=self.language.tp_group)

    def _to_tp_peers(self, tensor: Tensor | None, size: int, like: Tensor) -> Tensor:
        """The tensor of an encoder lane's leader, on all ranks of the lane."""
        tensor = like.new_empty(size, like.shape[1]) if tensor is None else tensor
        if self.encoder.tp_group is not None and size:
            dist.broadcast(tensor, group=self.encoder.tp_group, group_src=0)
        return tensor


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way.

    Attributes:
        tensor: the tensor, which must stay until the message is there.
        work: what waits for it; None if nothing is sent.
    """

    tensor: Tensor
    work: Any = None

    def wait(self) -> Tensor:
        """The tensor, once it has arrived or left."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def _group(ranks: set[int], backend: str | None) -> dist.ProcessGroup | None:
    """A group of these ranks, on all of them; None for a single rank, which needs none."""
    return None if len(ranks) == 1 else own_group([sorted(ranks)], backend)
