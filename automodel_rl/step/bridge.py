"""The bridge between an encoder and a language model on meshes of their own, beside the pipeline schedule.

A lane is a data rank: of the encoder, with the ranks that split its layers, or of the language model, with those ranks
of its first stage that share its microbatches. An encoder lane serves as many language lanes as the numbers of lanes
say (fan out), or several encoder lanes serve one language lane (fan in) and divide its images. Before the schedule
embeddings go to the language lanes, after it their gradients come back; how many there are may differ from microbatch
to microbatch.

Every exchange is a sequence of broadcasts in groups of one language lane and the encoder lanes that serve it. All ranks
go through groups and senders in the same order, so none waits for another in a circle.
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
    """A language lane and the encoder lanes that serve it, as far as this rank takes part.

    Attributes:
        readers: its ranks with the first stage; the first one speaks for it.
        writers: of every encoder lane that serves it the rank that speaks for it.
        encoders: of every encoder lane that serves it all ranks.
        device_group: readers and writers; None where that is one rank.
        control: readers and encoders, for objects; None where that is one rank.
    """

    readers: tuple[int, ...]
    writers: tuple[int, ...]
    encoders: tuple[tuple[int, ...], ...]
    device_group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None


class Bridge:
    """This rank's end of the bridge. Every method is a collective of all ranks with the encoder or a first stage.

    Args:
        vision, language: the layouts; this rank may be a guest of one.
        vision_ranks, language_ranks: of the job.

    Attributes:
        lanes: by the number of the language's data rank, those that this rank takes part in.
        reads: the lane whose microbatches this rank computes from the first stage on, None if it has no first stage.
        share: which of the encoder lanes that serve a lane this rank is of; None without the encoder.
    """

    def __init__(self, vision: Layout, language: Layout, vision_ranks: Sequence[int], language_ranks: Sequence[int]):
        self.vision, self.language = vision, language
        encoders = torch.tensor(vision_ranks).reshape(vision.parallel.num_data_ranks, vision.parallel.tp).tolist()
        sizes = language.parallel
        stages = torch.tensor(language_ranks).reshape(sizes.pp, sizes.num_data_ranks, sizes.cp * sizes.tp)
        readers = stages[0].tolist()
        fan_in = max(1, len(encoders) // len(readers))
        fan_out = max(1, len(readers) // len(encoders))
        rank = dist.get_rank()
        self.lanes: dict[int, Lane] = {}
        self.share: int | None = None
        for number, of_lane in enumerate(readers):
            serving = encoders[number * fan_in : (number + 1) * fan_in] if fan_in > 1 else [encoders[number // fan_out]]
            writers = [ranks[0] for ranks in serving]
            everyone = sorted({*of_lane, *(r for ranks in serving for r in ranks)})
            device_group, control = _group({*of_lane, *writers}, None), _group(set(everyone), "gloo")
            if rank in everyone:
                self.lanes[number] = Lane(
                    tuple(of_lane), tuple(writers), tuple(map(tuple, serving)), device_group, control
                )
            self.share = next((n for n, ranks in enumerate(serving) if rank in ranks), self.share)
        self.reads = language.data_rank if language.has_first_stage else None

    @property
    def serves(self) -> list[int]:
        """Language lanes whose images this rank's encoder lane encodes, or some of them."""
        rank = dist.get_rank()
        return [n for n, lane in self.lanes.items() if any(rank in ranks for ranks in lane.encoders)]

    def exchange(self, value: Any) -> dict[int, Any]:
        """What the readers of every lane have, which is equal on all of them, on the encoders that serve it.

        Args:
            value: of this rank's lane; only those of readers count.
        """
        told = {}
        for number, lane in self.lanes.items():
            box = [value]
            if lane.control is not None:
                dist.broadcast_object_list(box, src=lane.readers[0], group=lane.control)
            told[number] = box[0]
        return told

    def any_encoder(self, flag: bool) -> bool:
        """Whether the flag is set on any rank with the encoder. A collective of those ranks alone."""
        vote = torch.tensor(int(flag))
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.vision.stage_control)
        return bool(vote)

    def to_language(self, embeddings: dict[int, Tensor], sizes: dict[int, list[int]], like: Tensor) -> list[Tensor]:
        """Embeddings of every lane's images, on its readers.

        Args:
            embeddings: of the lanes that this rank's encoder serves, [m, H]; not read on its ranks that do not speak.
            sizes: by lane, how many come from each of the encoder lanes that serve it.
            like: has their dtype, device and H.

        Returns:
            For this rank's lane one tensor [m, H] from each encoder lane; nothing on ranks that are no readers.
        """
        received = []
        for number, lane in self.lanes.items():
            for share, writer in enumerate(lane.writers):
                tensor = embeddings.get(number) if share == self.share and self._writes(lane) else None
                tensor = self._broadcast(tensor, sizes[number][share], like, writer, lane)
                if number == self.reads and tensor is not None:
                    received.append(tensor)
        return received

    def to_encoder(self, gradients: list[Tensor], sizes: dict[int, list[int]], like: Tensor) -> dict[int, Tensor]:
        """Gradients of what `to_language` brought, back on all ranks of the encoder lanes, by language lane.

        Args:
            gradients: on readers, of each tensor that `to_language` returned; this rank's summands.
            sizes, like: as there.
        """
        for gradient in gradients:
            self._sum_over_readers(gradient)
        mine: dict[int, Tensor] = {}
        for number, lane in self.lanes.items():
            for share in range(len(lane.writers)):
                tensor = gradients[share] if number == self.reads else None
                tensor = self._broadcast(tensor, sizes[number][share], like, lane.readers[0], lane)
                if share == self.share and number in self.serves:
                    mine[number] = self._to_tp_peers(tensor, sizes[number][share], like)
        return mine

    def _writes(self, lane: Lane) -> bool:
        return dist.get_rank() in lane.writers

    def _broadcast(self, tensor: Tensor | None, size: int, like: Tensor, source: int, lane: Lane) -> Tensor | None:
        """A tensor [size, H] of one rank on all of the lane's device group; None outside of it."""
        if dist.get_rank() not in (*lane.readers, *lane.writers):
            return None
        if dist.get_rank() != source:
            tensor = like.new_empty(size, like.shape[1])
        assert tensor is not None
        tensor = tensor.contiguous()
        if lane.device_group is not None and size:
            dist.broadcast(tensor, src=source, group=lane.device_group)
        return tensor

    def _sum_over_readers(self, gradient: Tensor) -> None:
        """Under context or sequence parallelism a rank has the gradients of its own tokens only."""
        if self.language.cp_group is not None and gradient.numel():
            dist.all_reduce(gradient, group=self.language.cp_group)
        if self.language.parallel.sequence_parallel and gradient.numel():
            dist.all_reduce(gradient, group=self.language.tp_group)

    def _to_tp_peers(self, tensor: Tensor | None, size: int, like: Tensor) -> Tensor:
        """From the rank that speaks for an encoder lane to those that split its layers with it."""
        tensor = like.new_empty(size, like.shape[1]) if tensor is None else tensor
        if self.vision.tp_group is not None and size:
            dist.broadcast(tensor, group=self.vision.tp_group, group_src=0)
        return tensor


def _group(ranks: set[int], backend: str | None) -> dist.ProcessGroup | None:
    """A group of these ranks, on all of them. One rank needs none."""
    return None if len(ranks) == 1 else own_group([sorted(ranks)], backend)
