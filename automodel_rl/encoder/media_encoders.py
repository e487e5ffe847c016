"""All encoders of a multimodal model as one."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.batch.media import ENCODERS, EncoderName
from automodel_rl.encoder.bridge import Bridge
from automodel_rl.encoder.encoding import Encoding
from automodel_rl.encoder.media_encoder import MediaEncoder
from automodel_rl.model.handle import ModelHandle


class MediaEncoders:
    """All encoders of a model as one. Each embeds its kind of media; they are in the order of `ENCODERS`
    (batch/media.py)."""

    def __init__(self, encoders: Sequence[MediaEncoder]):
        self.encoders = encoders

    @property
    def failure(self) -> Exception | None:
        return next((encoder.failure for encoder in self.encoders if encoder.failure is not None), None)

    def forward(self, microbatches: Sequence[Microbatch], train: bool) -> list[Callable[[], Tensor]]:
        of_encoders = [encoder.forward(microbatches, train) for encoder in self.encoders]
        return [functools.partial(_joined, of_microbatch) for of_microbatch in zip(*of_encoders, strict=True)]

    def backward(self) -> None:
        for encoder in self.encoders:
            encoder.backward()

    def abandon_step(self) -> None:
        for encoder in self.encoders:
            encoder.abandon_step()


def _joined(embeddings: Sequence[Callable[[], Tensor]]) -> Tensor:
    """Concatenates the embeddings of all encoders, [m, E]."""
    return torch.cat([of_encoder() for of_encoder in embeddings])


def make_encoders(handle: ModelHandle) -> MediaEncoders | None:
    """Returns the encoders of a multimodal model, on all ranks of the job; None for a text model."""
    encoders = [_make_encoder(handle, name) for name in ENCODERS if name in handle.meshes.encoders]
    return MediaEncoders(encoders) if encoders else None


def _make_encoder(handle: ModelHandle, name: EncoderName) -> MediaEncoder:
    layout, components = handle.meshes.encoders[name], handle.meshes.components
    assert components is not None
    part = next((component.parts[0] for component in handle.components if component.name == name), None)
    bridge = Bridge(layout, handle.layout, components.encoders[name].ranks, components.language.ranks)
    width = handle.config.hidden_size * (1 + handle.num_deepstack)
    like = torch.empty(0, width, dtype=handle.dtype, device=handle.layout.device)
    encoding = None
    if part is not None:
        encoding = Encoding(part, like, handle.partial_in_encoders[name], layout.tp_group)
    trains, is_colocated = name in handle.trained_encoders, components.is_colocated(name)
    return MediaEncoder(encoding, bridge, like, name, trains=trains, is_colocated=is_colocated)
