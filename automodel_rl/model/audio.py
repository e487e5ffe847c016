"""The encoder of audio: log-mel spectrograms in, embeddings of the language model out.

Qwen2-Audio's encoder is Whisper's (arXiv:2212.04356, section 2.2) with a pooling of two after it. It hears a window of
a fixed number of frames. Silence fills up a shorter clip, and no frame of the clip sees it in attention. Qwen2.5-Omni's
(arXiv:2503.20215, section 2.2) hears clips of any length in chunks that do not see each other.
"""

from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from automodel_rl.batch import Audio
from automodel_rl.batch.media import Media
from automodel_rl.model.encoder import EncoderPart
from automodel_rl.model.varlen import choose_varlen


class AudioForm(Enum):
    """The form in which an encoder hears clips."""

    WINDOW = "window"
    """A window of a fixed number of frames, filled up with silence: Qwen2-Audio."""

    CHUNKS = "chunks"
    """Clips of any length, in chunks: Qwen2.5-Omni."""


def audio_form(config: PretrainedConfig) -> AudioForm:
    """The form in which a model's encoder of audio hears clips.

    Args:
        config: the config of the whole model.
    """
    return AudioForm.WINDOW if config.audio_config.model_type == "qwen2_audio_encoder" else AudioForm.CHUNKS


LEAST_TOKENS = 2
"""Least tokens of a clip: transformers takes a single audio token for a prompt whose clips are not expanded."""


class AudioPart(EncoderPart):
    """The encoder of audio with its projector."""

    name = "audio"

    def forward(self, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        """Embeddings [m, H] of the tokens of all clips, in order.

        Args:
            loaded: log-mel spectrograms [mels, frames], on the device and in the compute dtype.
            media: the clips.
        """
        num_frames = torch.tensor([_clip(item).num_frames for item in media], device=loaded[0].device)
        if audio_form(self.config) is AudioForm.CHUNKS:
            positions = _num_positions(num_frames)
            return self.model.audio_tower(torch.cat(list(loaded), dim=1), num_frames, positions).last_hidden_state
        longest = self.config.audio_config.max_source_positions
        is_heard = torch.arange(longest, device=num_frames.device) < _num_positions(num_frames)[:, None]
        mask = is_heard[:, None, None, :].expand(-1, 1, longest, -1)
        hidden = self.model.audio_tower(torch.stack(list(loaded)), mask).last_hidden_state
        projected = self.model.multi_modal_projector(hidden)
        return torch.cat([rows[: item.num_tokens] for rows, item in zip(projected, media, strict=True)])

    def blank(self) -> Audio:
        """A clip of `LEAST_TOKENS` tokens."""
        frames = num_frames_of(LEAST_TOKENS)
        return Audio(0, LEAST_TOKENS, frames, torch.zeros(spectrogram_shape(self.config, frames)))

    def shape(self, item: Media) -> tuple[int, ...]:
        """The shape of a clip's spectrogram."""
        return spectrogram_shape(self.config, _clip(item).num_frames)

    def choose_attention(self, device: torch.device, dtype: torch.dtype) -> None:
        """Makes an encoder of chunks compute attention in one call for all, in bfloat16 on CUDA."""
        if audio_form(self.config) is AudioForm.CHUNKS:
            choose_varlen(self.model.audio_tower.config, device, dtype)


def _clip(item: Media) -> Audio:
    assert isinstance(item, Audio)
    return item


def spectrogram_shape(config: PretrainedConfig, num_frames: int) -> tuple[int, int]:
    """Mels and frames of a clip's spectrogram.

    Args:
        config: the config of the whole model.
        num_frames: frames of the clip itself.
    """
    audio = config.audio_config
    is_window = audio_form(config) is AudioForm.WINDOW
    return audio.num_mel_bins, 2 * audio.max_source_positions if is_window else num_frames


def num_audio_positions(config: PretrainedConfig, num_frames: int) -> int:
    """Number of positions that a clip takes in the encoder's layers. The arguments are those of `spectrogram_shape`."""
    return _num_positions(spectrogram_shape(config, num_frames)[1])


def clip_arguments(spectrograms: Sequence[Tensor], num_frames: Sequence[int]) -> dict[str, Tensor]:
    """The arguments of transformers' whole model for clips.

    Args:
        spectrograms: [mels, frames] of each clip.
        num_frames: frames of each clip, without those of silence that fill it up.
    """
    longest = max(spectrogram.shape[1] for spectrogram in spectrograms)
    padded = torch.stack([pad(spectrogram, (0, longest - spectrogram.shape[1])) for spectrogram in spectrograms])
    heard = torch.arange(longest, device=padded.device) < torch.tensor(num_frames, device=padded.device)[:, None]
    return {"input_features": padded, "feature_attention_mask": heard.long()}


Number = TypeVar("Number", int, Tensor)


def _num_positions(num_frames: Number) -> Number:
    """Number of positions of the encoder's layers: the second convolution takes every other frame."""
    return (num_frames - 1) // 2 + 1


def num_audio_tokens(num_frames: int) -> int:
    """Number of tokens of a clip: each is the mean of two of the encoder's positions.

    Args:
        num_frames: frames of its spectrogram, without those of silence that fill it up.
    """
    return (_num_positions(num_frames) - 2) // 2 + 1


def num_frames_of(num_tokens: int) -> int:
    """The fewest frames of a clip with so many tokens."""
    return 4 * num_tokens - 1
