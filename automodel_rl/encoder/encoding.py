"""Encoder computation on one rank, independent of its placement relative to the language model."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_rl.batch.media import Media
from automodel_rl.errors import InputError
from automodel_rl.model.encoder import EncoderPart
from automodel_rl.parallel.gradients import sum_partial_gradients
from automodel_rl.parallel.sharding import begin_backward

READING_THREADS = 8
"""Threads that read media on each rank with the encoder."""

READ_AHEAD = 2 * READING_THREADS
"""Maximum number of media being read or waiting for the encoder."""


class Encoding:
    """Runs an encoder forward and backward, a few media at a time.

    An encoder that takes images one by one has a forward and a backward for each. Otherwise its layers would run
    several times per backward, with an FSDP reduction each time, and ranks with other numbers of images would hang.

    Args:
        like: a tensor [0, E] of the embeddings' dtype and device. E is the language model's hidden size, or a
            multiple if features follow each embedding (batch/media.py).
        partial: parameters, as (module, name), whose gradient on each tp rank is only a summand.

    Attributes:
        failure: why some media of the last step were replaced by a black image, silence or zeros; None if none were.
    """

    def __init__(
        self,
        part: EncoderPart,
        like: Tensor,
        partial: Sequence[tuple[nn.Module, str]],
        tp_group: dist.ProcessGroup | None,
    ):
        self.part, self.like, self.partial, self.tp_group = part, like, partial, tp_group
        self._outputs: list[list[Tensor]] = []  # of forwards whose backward is pending
        self.blank = part.blank()  # encoded by ranks without media, to join their peers' collectives
        self.failure: Exception | None = None

    def forward(self, media: Sequence[Media], loads: Sequence[Future[Tensor]]) -> Tensor:
        """Embeds media, [m, E], detached from their graph.

        Media that cannot be read, or need another number of embeddings, are recorded in `failure` and replaced, so
        that no other rank hangs. `loads` are the pending reads of pixels or spectrograms.
        """
        return self._run(media, [self._loaded(item, future) for item, future in zip(media, loads, strict=True)])

    def forward_blank(self) -> Tensor:
        """Embeds the blank image or clip, whose result does not count."""
        return self._run([self.blank], [self.blank.load()])

    def backward(self, gradient: Tensor, is_last: bool) -> None:
        """Runs the backward of the oldest pending forward. `is_last` marks a step's last one, which reduces gradients
        over ranks."""
        outputs = self._outputs.pop(0)
        for number, output in enumerate(outputs):
            own, gradient = gradient.split([len(output), len(gradient) - len(output)])
            is_end = is_last and number == len(outputs) - 1
            begin_backward(self.part, is_end, reduces=False, reshards=False)
            output.backward(own)
        if is_last and self.tp_group is not None:
            sum_partial_gradients([module.get_parameter(name) for module, name in self.partial], self.tp_group)

    def clear(self) -> None:
        """Drops the state of pending backwards."""
        self._outputs = []

    def _loaded(self, item: Media, load: Future[Tensor]) -> Tensor:
        try:
            loaded = load.result()
            expected = self.part.shape(item)
            if loaded.shape != expected:
                raise ValueError(
                    f"{item.plural} of size {item.size} load as {list(expected)}, but one loads as "
                    f"{list(loaded.shape)}: use the model's own processor"
                )
        except (InputError, ValueError) as error:
            self.failure = self.failure or error
            return self._empty(item)
        return loaded

    def _empty(self, item: Media) -> Tensor:
        """Returns zeros in the shape of an item's loaded tensor."""
        return torch.zeros(()).expand(self.part.shape(item))

    def _run(self, media: Sequence[Media], loaded: Sequence[Tensor]) -> Tensor:
        size = 1 if self.part.family.is_unbatched else len(media)
        outputs = [
            self._run_once(media[start : start + size], loaded[start : start + size])
            for start in range(0, len(media), size)
        ]
        if torch.is_grad_enabled():
            self._outputs.append(outputs)
        return torch.cat([output.detach() for output in outputs])

    def _run_once(self, media: Sequence[Media], loaded: Sequence[Tensor]) -> Tensor:
        output: Tensor = self.part([tensor.to(self.like) for tensor in loaded], media)
        expected = sum(item.num_embeddings for item in media), self.like.shape[1]
        if output.shape != expected:
            self.failure = self.failure or ValueError(
                f"{len(media)} {media[0].plural} of sizes {[item.size for item in media]} need {expected[0]} "
                f"embeddings in their sequences, but the encoder makes {len(output)} embeddings of them: use the "
                "model's own processor, and its number of tokens"
            )
            return output.sum() * 0 + self.like.new_zeros(expected)
        return output
