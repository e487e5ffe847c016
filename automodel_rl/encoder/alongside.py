"""The encoder on ranks of its own: it works alongside the language model, like a stage before the first one.

While earlier microbatches are in the pipeline, the media of later ones are encoded. The encoder stays ahead by as many
microbatches as the first stage has forwards before it has a microbatch's gradient, and one more (`encoded_ahead`). Then
it waits for the gradient of its oldest microbatch, runs that one's backward, and encodes the next. So it keeps the
activations of no more media than that. parallel/pipeline/timeline.py plays the same order on paper.

The first stage asks for a microbatch's embeddings in its forward. They are a leaf tensor. Once the backward has left
the gradient there, it goes back. Both sides go through microbatches in order, so messages need no names.

A step without any image or clip leaves the encoder without gradients, so its optimizer does nothing, as in one
process. A rank that has none among the first microbatches encodes a blank one, to join its peers' collectives; it does
not count.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.batch.media import EncoderName, Media
from automodel_rl.encoder.bridge import Bridge, Transfer
from automodel_rl.encoder.encoding import READING_THREADS, Encoding
from automodel_rl.encoder.media_shares import MediaShares
from automodel_rl.parallel.pipeline.timeline import encoded_ahead
from automodel_rl.parallel.sharding import release_gathered


class EncoderAlongside:
    """Embeds media while the language model works. All ranks of the job call every method.

    Args:
        encoding: the encoder; None on ranks with the language model.
        bridge: the bridge to the language model.
        like: a tensor [0, E] like the embeddings (see `Encoding`).
        name: the encoder's component.
        trains: whether embeddings need gradients; the same on all ranks.
    """

    def __init__(self, encoding: Encoding | None, bridge: Bridge, like: Tensor, name: EncoderName, trains: bool):
        self.bridge, self.trains, self.shares = bridge, trains, MediaShares(bridge, name)
        self._encoding = None if encoding is None else _EncoderEnd(encoding, bridge, self.shares)
        self._reading = None if bridge.own_lane is None else _LanguageEnd(bridge, self.shares, like, bridge.own_lane)

    @property
    def failure(self) -> Exception | None:
        """Why media of the last step have no embeddings of their own; None if all have, or another rank encodes."""
        return None if self._encoding is None else self._encoding.encoding.failure

    def forward(self, microbatches: Sequence[Microbatch], train: bool) -> list[Callable[[], Tensor]]:
        """Starts a step. On ranks with the encoder it encodes the first microbatches' media, or without `train` all.

        Args:
            microbatches: this data rank's microbatches.
            train: whether `backward` follows.

        Returns:
            Functions that wait for the embeddings [m, E] of every microbatch of this rank; each is called once, in
            order. None on ranks without a first stage.
        """
        self.shares.exchange(microbatches)
        keeps = train and self.trains
        if self._encoding is not None:
            self._encoding.start(keeps)
        return [] if self._reading is None else self._reading.start(keeps)

    def backward(self) -> None:
        """Ends a step. On ranks with the encoder it runs the rest of it."""
        if self._encoding is not None:
            self._encoding.finish()
        if self._reading is not None:
            self._reading.finish()
        self.shares.clear()

    def abandon_step(self) -> None:
        """Drops what is kept for a backward that will not come."""
        for end in (self._encoding, self._reading):
            if end is not None:
                end.clear()
        self.shares.clear()


class _EncoderEnd:
    """The work of a rank with the encoder."""

    def __init__(self, encoding: Encoding, bridge: Bridge, shares: MediaShares):
        self.encoding, self.bridge, self.shares = encoding, bridge, shares
        self._pool: ThreadPoolExecutor | None = None
        self.clear()

    def clear(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self.encoding.clear()
        self._pool = None
        self._blank_chunk: Tensor | None = None
        self._chunks: dict[tuple[int, int], Tensor] = {}  # by microbatch and lane, those that wait for their gradient
        self._loads: dict[tuple[int, int], list[Future[Tensor]]] = {}
        self._sent: list[Transfer] = []
        self._keeps = self._works = False

    def start(self, keeps: bool) -> None:
        """Encodes the media of the first microbatches; of all if nothing is kept for a backward."""
        self.clear()  # of a forward without backward
        self.encoding.failure, self._pool = None, ThreadPoolExecutor(READING_THREADS)
        self._keeps, self._works = keeps, self.bridge.any_encoder(self.shares.has_media)
        if not self._works:
            return
        count = self.shares.num_microbatches
        ahead = min(count, encoded_ahead(self.bridge.language.parallel, count)) if keeps else count
        if not any(self._media(number, lane) for number in range(ahead) for lane in self.bridge.served_lanes):
            with torch.set_grad_enabled(keeps):
                self._blank_chunk = self.encoding.forward_blank()
        for number in range(ahead):
            self._encode(number)
        if not keeps:
            self._wait()
            self.clear()
            release_gathered(self.encoding.part)

    def finish(self) -> None:
        """Runs the backwards of all microbatches as their gradients come, and encodes the media of the others."""
        if not (self._works and self._keeps):
            return
        count = self.shares.num_microbatches
        ahead = encoded_ahead(self.bridge.language.parallel, count)
        places = [(number, lane) for number in range(count) for lane in self.bridge.served_lanes]
        left = [place for place in places if self._media(*place)]
        if self._blank_chunk is not None:
            self.encoding.backward(torch.zeros_like(self._blank_chunk), is_last=not left)
        for number in range(count):
            for lane in self.bridge.served_lanes:
                if (number, lane) in self._chunks:
                    chunk = self._chunks.pop((number, lane))
                    gradient = self.bridge.take_gradient(lane, len(chunk), self.encoding.like)
                    self.encoding.backward(gradient, is_last=(number, lane) == left[-1])
            if number + ahead < count:
                self._encode(number + ahead)
        self._wait()
        self.clear()

    def _encode(self, number: int) -> None:
        """Encodes the media of a microbatch, and sends their embeddings on their way."""
        for lane in self.bridge.served_lanes:
            media = self._media(number, lane)
            if not media:
                continue
            self._read(number, lane)
            loads = self._loads.pop((number, lane))
            for later in (number, number + 1):  # read while the device encodes
                for other in self.bridge.served_lanes:
                    if (later, other) > (number, lane) and later < self.shares.num_microbatches:
                        self._read(later, other)
            with torch.set_grad_enabled(self._keeps):
                chunk = self.encoding.forward(media, loads)
            if self._keeps:
                self._chunks[number, lane] = chunk
            self._sent.append(self.bridge.send_embeddings(lane, chunk))

    def _read(self, number: int, lane: int) -> None:
        """Starts to read a microbatch's images or clips, if that has not begun."""
        assert self._pool is not None
        if (number, lane) not in self._loads:
            self._loads[number, lane] = [self._pool.submit(item.load) for item in self._media(number, lane)]

    def _media(self, number: int, lane: int) -> list[Media]:
        assert self.bridge.own_share is not None
        return self.shares.of_share(lane, self.bridge.own_share, number)

    def _wait(self) -> None:
        for message in self._sent:
            message.wait()


class _LanguageEnd:
    """The work of a rank with the first stage. The arguments are those of `EncoderAlongside`, and its own lane."""

    def __init__(self, bridge: Bridge, shares: MediaShares, like: Tensor, lane: int):
        self.bridge, self.shares, self.like, self.lane = bridge, shares, like, lane
        self.clear()

    def clear(self) -> None:
        self._arriving: dict[int, list[Transfer]] = {}
        self._gradients: dict[int, Tensor] = {}  # those that wait for that of an earlier microbatch
        self._next_gradient = 0
        self._sent: list[Transfer] = []
        self._keeps = False

    def start(self, keeps: bool) -> list[Callable[[], Tensor]]:
        self.clear()
        self._keeps = keeps
        return [functools.partial(self._embeddings, number) for number in range(self.shares.num_microbatches)]

    def finish(self) -> None:
        """Sends the gradients that are still missing, of microbatches that took no part in the loss."""
        for number in range(self._next_gradient, self.shares.num_microbatches if self._keeps else 0):
            tokens = sum(item.num_embeddings for item in self.shares.of_lane(self.lane, number))
            self._gradients.setdefault(number, self.like.new_zeros(tokens, self.like.shape[1]))
        self._send()
        for message in self._sent:
            message.wait()
        self.clear()

    def _embeddings(self, number: int) -> Tensor:
        """Waits for the embeddings of a microbatch, and asks for the embeddings of the next microbatch."""
        for asked in (number, number + 1):
            if asked not in self._arriving and asked < self.shares.num_microbatches:
                sizes = [self.shares.size(self.lane, share, asked) for share in self._places]
                self._arriving[asked] = [
                    self.bridge.receive_embeddings(share, size, self.like) for share, size in enumerate(sizes)
                ]
        arrived = [message.wait() for message in self._arriving[number]]
        self._arriving[number] = []
        leaf = self.shares.joined(self.lane, number, arrived, self.like).requires_grad_(self._keeps)
        if self._keeps:
            leaf.register_post_accumulate_grad_hook(functools.partial(self._take, number))
        return leaf

    def _take(self, number: int, leaf: Tensor) -> None:
        """Called by autograd once a microbatch's backward has left its gradient."""
        assert leaf.grad is not None
        self._gradients[number], leaf.grad = leaf.grad, None
        self._send()

    def _send(self) -> None:
        while self._next_gradient in self._gradients:
            number = self._next_gradient
            gradient = self._gradients.pop(number)
            self.bridge.sum_over_language_lane(gradient)
            self._next_gradient += 1
            for share, part in enumerate(self.shares.divided(self.lane, number, gradient)):
                self._sent.append(self.bridge.return_gradient(share, part))

    @property
    def _places(self) -> range:
        return range(len(self.bridge.lanes[self.lane].encoder_leaders))
