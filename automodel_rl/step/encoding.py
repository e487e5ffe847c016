"""The work of a rank with the encoder, whichever way it goes beside the language model."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_rl.batch import Image
from automodel_rl.errors import InputError
from automodel_rl.model.vision import VisionPart, blank_image, pixel_shape
from automodel_rl.parallel.gradients import sum_partial_gradients
from automodel_rl.parallel.sharding import reduce_gradients, release_gathered
from automodel_rl.step.encoder_messages import StageMessages
from automodel_rl.support.description import ImageForm, image_form

READING_THREADS = 8
"""Number of threads that read pictures on each rank with the encoder."""


class Encoding:
    """Runs an encoder, or one stage of its pipeline, forward and backward, a few images at a time.

    An encoder that takes images one by one has a forward and a backward for each. Otherwise layers would run several
    times in a backward. FSDP reduces gradients each time, so ranks with other numbers of images would wait in vain.

    Args:
        part: the encoder, or this rank's stage of it.
        like: a tensor [0, E] of the embeddings' dtype, on the device. E is the hidden size of the language model, or a
            multiple of it if features follow each embedding (batch/images.py).
        partial: parameters, as (module, name), for which each tp rank's gradient is only a summand.
        tp_group: the ranks that split the encoder's layers; None for one.
        messages: the messages between stages; None if there is one stage.

    Attributes:
        failure: why images of the last step have no embeddings of their own, but those of a black image or zeros; None
            if all have.
    """

    def __init__(
        self,
        part: VisionPart,
        like: Tensor,
        partial: Sequence[tuple[nn.Module, str]],
        tp_group: dist.ProcessGroup | None,
        messages: StageMessages | None,
    ):
        self.part, self.like, self.partial, self.tp_group, self.messages = part, like, partial, tp_group, messages
        self.one_by_one = image_form(part.config) is ImageForm.ANY_SIZE
        self._outputs: list[list[Tensor]] = []  # of forwards that wait for their backward
        self.blank = blank_image(part.config)  # a rank without images encodes it, to join its peers' collectives
        self.failure: Exception | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank reads images."""
        return self.messages is None or self.messages.is_first

    @property
    def is_last(self) -> bool:
        """Whether this rank makes embeddings."""
        return self.messages is None or self.messages.is_last

    def forward(self, images: Sequence[Image], pixels: Sequence[Future[Tensor]]) -> Tensor:
        """Embeddings of images, [m, E], without their graph; zeros on all stages but the last.

        If images cannot be read, or need another number of embeddings, it notes why and goes on with others, so that no
        other rank waits in vain.

        Args:
            images: the images.
            pixels: what reads their pixels; empty on all stages but the first.
        """
        if self.is_first:
            loaded = [self._loaded(image, future) for image, future in zip(images, pixels, strict=True)]
        else:
            loaded = [self._black(image) for image in images]
        return self._run(images, loaded)

    def forward_blank(self) -> Tensor:
        """Embeddings of the blank image, which do not count."""
        return self._run([self.blank], [self.blank.load()])

    def backward(self, gradient: Tensor, is_last: bool) -> None:
        """Runs the backward of the oldest forward that has had none.

        Args:
            gradient: the gradient of what the forward gave; read on the last stage only.
            is_last: whether it is the last backward of a step, which reduces gradients over ranks.
        """
        outputs = self._outputs.pop(0)
        for number, output in enumerate(outputs):
            own, gradient = gradient.split([len(output), len(gradient) - len(output)])
            reduce_gradients(self.part, is_last and number == len(outputs) - 1)
            if self.messages is None:
                output.backward(own)
            else:
                self.messages.backward(output, own)
        if is_last and self.tp_group is not None:
            sum_partial_gradients([module.get_parameter(name) for module, name in self.partial], self.tp_group)

    def finish(self) -> None:
        """Ends a step, once all its messages have left."""
        self._outputs = []
        if self.messages is not None:
            self.messages.finish()
            if not self.messages.link.gets_gradients:  # no backward has let go of its weights
                release_gathered(self.part)

    def clear(self) -> None:
        """Drops what is kept for backwards that will not come."""
        self._outputs = []
        if self.messages is not None:
            self.messages.clear()

    def _loaded(self, image: Image, pixels: Future[Tensor]) -> Tensor:
        try:
            loaded = pixels.result()
            expected = self._shape(image)
            if loaded.shape != expected:
                raise ValueError(
                    f"an image with grid {image.grid} has pixels {list(loaded.shape)} and needs {list(expected)}: use "
                    "the model's own image processor"
                )
        except (InputError, ValueError) as error:
            self.failure = self.failure or error
            return self._black(image)
        return loaded

    def _black(self, image: Image) -> Tensor:
        """Pixels of the image's shape."""
        return torch.zeros(()).expand(self._shape(image))

    def _shape(self, image: Image) -> tuple[int, ...]:
        return pixel_shape(self.part.config, self.blank, image.grid)

    def _run(self, images: Sequence[Image], loaded: Sequence[Tensor]) -> Tensor:
        size = 1 if self.one_by_one else len(images)
        outputs = [
            self._run_once(images[start : start + size], loaded[start : start + size])
            for start in range(0, len(images), size)
        ]
        if torch.is_grad_enabled():
            self._outputs.append(outputs)
        return torch.cat([output.detach() for output in outputs])

    def _run_once(self, images: Sequence[Image], loaded: Sequence[Tensor]) -> Tensor:
        output = self.part([pixels.to(self.like) for pixels in loaded], [image.grid for image in images])
        expected = sum(image.num_embeddings for image in images), self.like.shape[1]
        if self.messages is not None:
            self.messages.end_forward(output if isinstance(output, list) else [])
        if isinstance(output, list):
            return self.like.new_zeros(()).expand(expected)
        if output.shape != expected:
            self.failure = self.failure or ValueError(
                f"{len(images)} images with grids {[image.grid for image in images]} need {expected[0]} embeddings in "
                f"their sequences, but the encoder makes {len(output)} embeddings of them: use the model's own "
                "image processor, and as many tokens as it says"
            )
            return output.sum() * 0 + self.like.new_zeros(expected)
        return output
