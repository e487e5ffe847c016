"""Runs the encoder of a vision-language model beside the language model, in turns or alongside it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.model.handle import ModelHandle
from automodel_rl.step.bridge import Bridge
from automodel_rl.step.encoder_alongside import EncoderAlongside
from automodel_rl.step.encoder_in_turn import EncoderInTurn
from automodel_rl.step.encoder_messages import StageMessages, neighbours
from automodel_rl.step.encoding import Encoding


class ImageEncoder(Protocol):
    """Embeds the images of a step's microbatches on the ranks with the encoder, for the ranks with a first stage.

    All ranks of the job call every method.
    """

    @property
    def failure(self) -> Exception | None:
        """Why images of the last step, on this rank, have no embeddings of their own; None if all have."""
        ...

    def forward(self, microbatches: Sequence[Microbatch], train: bool) -> list[Callable[[], Tensor]]:
        """Functions that give the embeddings [m, E] of every microbatch of this rank; none on ranks without a first
        stage. Each is called once, in order."""
        ...

    def backward(self) -> None:
        """Ends a step: the encoder has its gradients. Called after the language model's schedule."""
        ...

    def abandon_step(self) -> None:
        """Drops what is kept for a backward that will not come."""
        ...


def make_image_encoder(handle: ModelHandle) -> ImageEncoder | None:
    """The encoder of a vision-language model, on all ranks of the job; None for a model that reads text only."""
    vision, components = handle.meshes.vision, handle.meshes.components
    if vision is None or components is None:
        return None
    part = next((component.parts[0] for component in handle.components if component.name == "vision"), None)
    bridge = Bridge(vision, handle.layout, components.vision.ranks, components.language.ranks)
    width = handle.config.hidden_size * (1 + handle.num_deepstack)
    like = torch.empty(0, width, dtype=handle.dtype, device=handle.layout.device)
    before, after = neighbours(components.vision)
    encoding = None
    if part is not None:
        messages = None if part.link is None else StageMessages(part.link, before, after)
        encoding = Encoding(part, like, handle.partial_in_encoder, vision.tp_group, messages)
    if components.is_colocated:
        assert encoding is not None
        return EncoderInTurn(encoding, bridge, handle.trains_encoder)
    return EncoderAlongside(encoding, bridge, like, handle.trains_encoder)
