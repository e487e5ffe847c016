"""One encoder beside the language model: when media are encoded, and when gradients come back.

An encoder works like a stage before the first one. It encodes the media of some microbatches ahead, waits for the
gradient of the oldest, runs its backward, and encodes the next. Both sides process microbatches in order, so messages
need no tags.

- On ranks of its own it stays ahead by one more microbatch than the first stage has forwards before its first
  gradient (`encoded_ahead`), and keeps no more activations. parallel/pipeline/timeline.py simulates the same order.
- On the language model's ranks it encodes all microbatches first, because pipeline schedules do not know the encoder.

A microbatch's embeddings are a leaf tensor, in which the language model's backward leaves their gradient.

A step without media leaves the encoder without gradients, so its optimizer does nothing, as in one process. A rank
without media among the first microbatches encodes a blank item, which does not count, to join its peers' collectives.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.batch.media import EncoderName, Media
from automodel_rl.encoder.bridge import Bridge, Transfer
from automodel_rl.encoder.encoding import READ_AHEAD, READING_THREADS, Encoding
from automodel_rl.encoder.media_shares import MediaShares
from automodel_rl.parallel.pipeline.timeline import encoded_ahead
from automodel_rl.parallel.sharding import release_gathered


class MediaEncoder:
    """Embeds the media of a step's microbatches, on the ranks with the encoder for the ranks with a first stage. All
    ranks of the job call every method.

    Args:
        encoding: the encoder; None on ranks without it.
        trains: whether embeddings need gradients; the same on all ranks.
        is_colocated: whether the encoder is on the language model's ranks.
    """

    def __init__(
        self,
        encoding: Encoding | None,
        bridge: Bridge,
        like: Tensor,
        name: EncoderName,
        *,
        trains: bool,
        is_colocated: bool,
    ):
        self.bridge, self.like, self.trains, self.is_colocated = bridge, like, trains, is_colocated
        self.shares = MediaShares(bridge, name)
        self._encoder = None if encoding is None else _Encoder(encoding, bridge, self.shares)
        self._reset()

    def _reset(self) -> None:
        self._ahead = 0
        self._keeps = False
        self._arriving: dict[int, list[Transfer]] = {}
        self._gradients: dict[int, Tensor] = {}  # waiting for an earlier microbatch's
        self._num_returned = 0
        self._leaving: list[Transfer] = []

    @property
    def failure(self) -> Exception | None:
        """Why some media of the last step were replaced; None if none were, or if other ranks encode."""
        return None if self._encoder is None else self._encoder.encoding.failure

    def forward(self, microbatches: Sequence[Microbatch], train: bool) -> list[Callable[[], Tensor]]:
        """Starts a step: encodes the media of the first microbatches, or without `train` (no `backward` follows) of
        all. Returns one function per microbatch of this rank that waits for its embeddings [m, E], to be called once
        each, in order; none on ranks without a first stage."""
        self.abandon_step()  # a forward without backward may precede
        self.shares.exchange(microbatches)
        count, self._keeps = self.shares.num_microbatches, train and self.trains
        is_all = self.is_colocated or not self._keeps or not count  # a rank without lanes has no microbatches
        self._ahead = count if is_all else min(count, encoded_ahead(self.bridge.language.parallel, count))
        if self._encoder is not None:
            self._encoder.start(self._keeps, self._ahead)
        for number in range(self._ahead):
            self._encode(number)
        if self.is_colocated:  # only now, as messages may wait for other ranks
            for number in range(count):
                self._carry(number)
        if not self._keeps and self._encoder is not None:
            self._wait()
            self._encoder.end()
        if self.bridge.own_lane is None:
            return []
        return [functools.partial(self._embeddings, number) for number in range(count)]

    def backward(self) -> None:
        """Ends a step after the language model's schedule: completes the encoder's gradients."""
        count = self.shares.num_microbatches if self._keeps else 0
        back: dict[int, dict[int, Tensor]] = {}
        if self.is_colocated or self._encoder is None:  # before waiting for peers in the encoder's last backward
            back = {number: self._carry_back(number) for number in range(self._num_returned, count)}
        if self._encoder is not None:
            for number in range(count):
                if self.is_colocated:
                    self._encoder.backward(number, back.pop(number))
                for lane in self.bridge.served_lanes if not self.is_colocated else ():
                    self._encoder.backward(number, self._carry_back(number, lane))
                if number + self._ahead < count:
                    self._encode(number + self._ahead)
        self._wait()
        self.abandon_step()

    def abandon_step(self) -> None:
        """Drops the state of a pending backward."""
        self._reset()
        self.shares.clear()
        if self._encoder is not None:
            self._encoder.end()

    def _encode(self, number: int) -> None:
        """Encodes a microbatch's media, one language lane at a time; an encoder on its own ranks sends each at once."""
        if self._encoder is None:
            return
        for lane in self.bridge.served_lanes:
            self._encoder.encode(number, lane)
            if not self.is_colocated:
                self._carry(number, lane)

    def _carry(self, number: int, lane: int | None = None) -> None:
        """Sends and receives a microbatch's embeddings, for one language lane or all lanes of this rank."""
        chunks = {} if self._encoder is None else self._encoder.chunks_of(number)
        crossing = self.bridge.to_language(chunks, self.shares.sizes(number, lane), self.like)
        self._arriving[number] = crossing.incoming
        self._leaving += crossing.outgoing

    def _carry_back(self, number: int, of: int | None = None) -> dict[int, Tensor]:
        """Sends and receives a microbatch's embedding gradients, for one language lane or all lanes of this rank.
        Returns those of this rank's encoder lane, by language lane."""
        gradients: list[Tensor] = []
        lane = self.bridge.own_lane
        if lane is not None:
            gradient = self._gradients.pop(number, None)
            if gradient is None:  # not used in the loss
                tokens = sum(item.num_embeddings for item in self.shares.of_lane(lane, number))
                gradient = self.like.new_zeros(tokens, self.like.shape[1])
            self.bridge.sum_over_language_lane(gradient)
            gradients = self.shares.divided(lane, number, gradient)
        mine, crossing = self.bridge.to_encoder(gradients, self.shares.sizes(number, of), self.like)
        self._leaving += crossing.outgoing
        self._num_returned = number + 1
        return mine

    def _embeddings(self, number: int) -> Tensor:
        """Waits for the embeddings of a microbatch, and requests the next one's."""
        for asked in (number, number + 1):
            if asked not in self._arriving and asked < self.shares.num_microbatches:
                self._carry(asked)
        lane = self.bridge.own_lane
        assert lane is not None
        arrived = [transfer.wait() for transfer in self._arriving[number]]
        self._arriving[number] = []
        leaf = self.shares.joined(lane, number, arrived, self.like).requires_grad_(self._keeps)
        if self._keeps:
            leaf.register_post_accumulate_grad_hook(functools.partial(self._take, number))
        return leaf

    def _take(self, number: int, leaf: Tensor) -> None:
        """Autograd hook that takes a microbatch's gradient. To an encoder on other ranks it is sent at once, in
        order."""
        assert leaf.grad is not None
        self._gradients[number], leaf.grad = leaf.grad, None
        while not self.is_colocated and self._num_returned in self._gradients:
            self._carry_back(self._num_returned)

    def _wait(self) -> None:
        for transfer in self._leaving:
            transfer.wait()
        self._leaving = []


class _Encoder:
    """The work in a step of a rank with the encoder."""

    def __init__(self, encoding: Encoding, bridge: Bridge, shares: MediaShares):
        self.encoding, self.bridge, self.shares = encoding, bridge, shares
        self._pool: ThreadPoolExecutor | None = None
        self._keeps = False
        self.end()

    def end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            if not self._keeps:
                release_gathered(self.encoding.part)
        self._pool = None
        self.encoding.clear()
        self._blank: Tensor | None = None
        self._chunks: dict[tuple[int, int], Tensor] = {}  # by microbatch and language lane
        self._loads: dict[tuple[int, int], list[Future[Tensor]]] = {}
        self._left: list[tuple[int, int]] = []  # (microbatch, lane) pairs with media, in order
        self._num_read = 0
        self._keeps = False

    def start(self, keeps: bool, ahead: int) -> None:
        """Starts a step of which `ahead` microbatches are encoded ahead."""
        self._pool, self._keeps, self.encoding.failure = ThreadPoolExecutor(READING_THREADS), keeps, None
        if not self.bridge.any_encoder(self.shares.has_media):
            return
        numbers = range(self.shares.num_microbatches)
        places = [(number, lane) for number in numbers for lane in self.bridge.served_lanes]
        self._left = [place for place in places if self._media(*place)]
        if not self._left or self._left[0][0] >= ahead:
            with torch.set_grad_enabled(keeps):
                self._blank = self.encoding.forward_blank()

    def encode(self, number: int, lane: int) -> None:
        """Encodes a language lane's media of a microbatch, while files of later ones are read."""
        media = self._media(number, lane)
        if not media:
            return
        self._read_ahead()
        loads = self._loads.pop((number, lane))
        self._read_ahead()
        with torch.set_grad_enabled(self._keeps):
            self._chunks[number, lane] = self.encoding.forward(media, loads)

    def chunks_of(self, number: int) -> dict[int, Tensor]:
        """Returns the embeddings of a microbatch, by language lane."""
        return {lane: chunk for (of, lane), chunk in self._chunks.items() if of == number}

    def backward(self, number: int, gradients: dict[int, Tensor]) -> None:
        """Runs the backward of a microbatch, given gradients by language lane."""
        if self._blank is not None:
            self.encoding.backward(torch.zeros_like(self._blank), is_last=not self._left)
            self._blank = None
        for lane, gradient in gradients.items():
            del self._chunks[number, lane]
            self.encoding.backward(gradient, is_last=(number, lane) == self._left[-1])

    def _read_ahead(self) -> None:
        """Starts reading media in order, until `READ_AHEAD` of them, or all, are being read or waiting for their
        forward."""
        assert self._pool is not None
        while self._num_read < len(self._left) and sum(map(len, self._loads.values())) < READ_AHEAD:
            place = self._left[self._num_read]
            self._loads[place] = [self._pool.submit(item.load) for item in self._media(*place)]
            self._num_read += 1

    def _media(self, number: int, lane: int) -> list[Media]:
        assert self.bridge.own_share is not None
        return self.shares.of_share(lane, self.bridge.own_share, number)
