"""The work of a rank with the encoder, whichever way it goes beside the language model."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch.distributed as dist
from torch import Tensor, nn

from automodel_rl.batch import Image
from automodel_rl.errors import InputError
from automodel_rl.model.vision import VisionPart
from automodel_rl.parallel.gradients import sum_partial_gradients
from automodel_rl.parallel.sharding import reduce_gradients

READING_THREADS = 8
"""Number of threads that read pictures on each rank with the encoder."""


class Encoding:
    """Runs an encoder forward and backward, a few images at a time.

    Args:
        part: the encoder.
        blank: an image that a rank without images encodes, so that it joins its peers' collectives.
        like: a tensor [0, E] of the embeddings' dtype, on the device. E is the hidden size of the language model, or a
            multiple of it if features follow each embedding (batch/images.py).
        partial: parameters, as (module, name), for which each tp rank's gradient is only a summand.
        tp_group: the ranks that split the encoder's layers; None for one.

    Attributes:
        failure: why images of the last step have no embeddings but zeros; None if all have.
    """

    def __init__(
        self,
        part: VisionPart,
        blank: Image,
        like: Tensor,
        partial: Sequence[tuple[nn.Module, str]],
        tp_group: dist.ProcessGroup | None,
    ):
        self.part, self.blank, self.like, self.partial, self.tp_group = part, blank, like, partial, tp_group
        self.failure: Exception | None = None

    def forward(self, images: Sequence[Image], pixels: Sequence[Future[Tensor]]) -> Tensor:
        """Embeddings of images, [m, E].

        If they cannot be read or encoded, it notes why and gives zeros, so that no other rank waits in vain. These have
        the graph of a blank image, for the collectives of the backward.

        Args:
            images: the images.
            pixels: what reads their pixels.
        """
        try:
            return self._run(images, [future.result() for future in pixels])
        except (InputError, ValueError) as error:
            self.failure = self.failure or error
            size = sum(image.num_embeddings for image in images)
            return self.forward_blank().sum() * 0 + self.like.new_zeros(size, self.like.shape[1])

    def forward_blank(self) -> Tensor:
        """Embeddings of the blank image, which do not count."""
        return self._run([self.blank], [self.blank.load()])

    def backward(self, embeddings: Tensor, gradient: Tensor, is_last: bool) -> None:
        """Runs the backward of what a forward gave. The last of a step reduces gradients over ranks."""
        reduce_gradients(self.part, is_last)
        embeddings.backward(gradient)
        if is_last and self.tp_group is not None:
            sum_partial_gradients([module.get_parameter(name) for module, name in self.partial], self.tp_group)

    def _run(self, images: Sequence[Image], loaded: Sequence[Tensor]) -> Tensor:
        embeddings = self.part([pixels.to(self.like) for pixels in loaded], [image.grid for image in images])
        expected = sum(image.num_embeddings for image in images)
        if embeddings.shape != (expected, self.like.shape[1]):
            raise ValueError(
                f"{len(images)} images with grids {[image.grid for image in images]} need {expected} embeddings in "
                f"their sequences, but the encoder makes {len(embeddings)} embeddings of them: use the model's own "
                "image processor, and as many tokens as it says"
            )
        return embeddings
