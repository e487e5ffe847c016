"""The encoder and the language model on the same ranks: they take turns in a step.

The media of all microbatches of a step are encoded before the language model's first forward. The encoder's backward
runs after the language model's last one. So a pipeline schedule knows nothing of the encoder. The embeddings of each
microbatch are a leaf tensor, in which the schedule leaves their gradient.

A step without any image or clip leaves the encoder without gradients, so its optimizer does nothing, as in one
process. If only this rank has none, it encodes a blank one to join its peers' collectives; that one does not count.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.batch.media import EncoderName
from automodel_rl.encoder.bridge import Bridge
from automodel_rl.encoder.encoding import READING_THREADS, Encoding
from automodel_rl.encoder.media_shares import MediaShares
from automodel_rl.parallel.sharding import release_gathered


class EncoderInTurn:
    """Embeds the media of all microbatches at once. Every method is a collective of all ranks of the job.

    Args:
        encoding: the encoder.
        bridge: the bridge to the language model.
        name: the encoder's component.
        trains: whether embeddings need gradients; the same on all ranks.
    """

    def __init__(self, encoding: Encoding, bridge: Bridge, name: EncoderName, trains: bool):
        self.encoding, self.bridge, self.trains = encoding, bridge, trains
        self.like, self.shares = encoding.like, MediaShares(bridge, name)
        self._encoded: list[tuple[int, Tensor]] = []
        self._leaves: list[Tensor] = []

    @property
    def failure(self) -> Exception | None:
        """Why media of the last step have no embeddings of their own; None if all have."""
        return self.encoding.failure

    def forward(self, microbatches: Sequence[Microbatch], train: bool) -> list[Callable[[], Tensor]]:
        """Functions that give the embeddings [m, E] of every microbatch of this rank, m may be 0; none on ranks without
        a first stage.

        Args:
            microbatches: this data rank's microbatches.
            train: whether to keep what `backward` needs.
        """
        self.abandon_step()  # of a forward without backward
        self.shares.exchange(microbatches)
        self.encoding.failure = None
        if self.bridge.any_encoder(self.shares.has_media):
            with torch.set_grad_enabled(train and self.trains):
                self._encoded = self._encode()
        flat = {
            lane: torch.cat([self.like, *(chunk for number, chunk in self._encoded if number == lane)])
            for lane in self.bridge.served_lanes
        }
        received = self.bridge.to_language(flat, self._sizes(), self.like)
        lane = self.bridge.own_lane
        if lane is None:
            return []
        split = [
            list(tensor.split([self.shares.size(lane, share, m) for m in range(self.shares.num_microbatches)]))
            for share, tensor in enumerate(received)
        ]
        for microbatch in range(self.shares.num_microbatches):
            leaf = self.shares.joined(lane, microbatch, [of_share[microbatch] for of_share in split], self.like)
            self._leaves.append(leaf.requires_grad_(train and self.trains))
        return [functools.partial(self._leaves.__getitem__, number) for number in range(len(self._leaves))]

    def backward(self) -> None:
        """Runs the encoder's backward, from the gradients of the embeddings."""
        if not self.trains:
            self.abandon_step()
            release_gathered(self.encoding.part)
            return
        gradients: list[Tensor] = []
        lane = self.bridge.own_lane
        if lane is not None:
            of_microbatches = [
                self.shares.divided(lane, number, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
                for number, leaf in enumerate(self._leaves)
            ]
            num_shares = len(self.bridge.lanes[lane].encoder_leaders)
            gradients = [
                torch.cat([self.like, *(divided[share] for divided in of_microbatches)]) for share in range(num_shares)
            ]
        left = self.bridge.to_encoder(gradients, self._sizes(), self.like)
        for number, (served, chunk) in enumerate(self._encoded):
            gradient = torch.zeros_like(chunk)
            if served in left:  # a blank image does not count
                gradient, left[served] = left[served].split([len(chunk), len(left[served]) - len(chunk)])
            self.encoding.backward(gradient, is_last=number == len(self._encoded) - 1)
        self.abandon_step()

    def abandon_step(self) -> None:
        """Drops what is kept for a backward."""
        self.encoding.clear()
        self._encoded, self._leaves = [], []
        self.shares.clear()

    def _encode(self) -> list[tuple[int, Tensor]]:
        """The lane and the embeddings of each microbatch that has media for this rank, in order."""
        assert self.bridge.own_share is not None
        of_microbatches = [
            (lane, self.shares.of_share(lane, self.bridge.own_share, number))
            for lane in self.bridge.served_lanes
            for number in range(self.shares.num_microbatches)
        ]
        found = [(lane, media) for lane, media in of_microbatches if media]
        if not found:
            return [(-1, self.encoding.forward_blank())]
        # Files of later microbatches are read while the device encodes those of earlier ones.
        with ThreadPoolExecutor(READING_THREADS) as pool:
            loads = [[pool.submit(item.load) for item in media] for _, media in found]
            return [
                (lane, self.encoding.forward(media, futures))
                for (lane, media), futures in zip(found, loads, strict=True)
            ]

    def _sizes(self) -> dict[int, list[int]]:
        """Number of tokens that each serving encoder lane makes, by language lane."""
        return {
            number: [
                sum(self.shares.size(number, share, m) for m in range(self.shares.num_microbatches))
                for share in range(len(lane.encoder_leaders))
            ]
            for number, lane in self.bridge.lanes.items()
        }
