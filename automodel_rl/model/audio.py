"""The encoder of audio: log-mel spectrograms in, embeddings of the language model out.

Qwen2-Audio's encoder is Whisper's (arXiv:2212.04356, section 2.2) with a pooling of two after it. It hears a fixed
number of frames. Silence fills up a shorter clip, and no frame of the clip sees it in attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch import Audio
from automodel_rl.batch.media import Media
from automodel_rl.model.encoder import EncoderPart

LEAST_TOKENS = 2
"""Least tokens of a clip: transformers takes a single audio token for a prompt whose clips are not expanded."""


class AudioPart(EncoderPart):
    """The encoder of audio with its projector."""

    name = "audio"

    def embeddings(self, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        """Embeddings [m, H] of the tokens of all clips, in order.

        Args:
            loaded: log-mel spectrograms [mels, frames], on the device and in the compute dtype.
            media: the clips.
        """
        tower = self.model.audio_tower
        heard = torch.tensor([_num_positions(_clip(item).num_frames) for item in media], device=loaded[0].device)
        longest = self.config.audio_config.max_source_positions
        is_heard = torch.arange(longest, device=heard.device) < heard[:, None]
        mask = is_heard[:, None, None, :].expand(-1, 1, longest, -1)
        hidden = self.model.multi_modal_projector(tower(torch.stack(list(loaded)), mask).last_hidden_state)
        return torch.cat([rows[: item.num_tokens] for rows, item in zip(hidden, media, strict=True)])

    def blank(self) -> Audio:
        """A clip of `LEAST_TOKENS` tokens."""
        frames = num_frames_of(LEAST_TOKENS)
        return Audio(0, LEAST_TOKENS, frames, torch.zeros(spectrogram_shape(self.config)))

    def shape(self, item: Media) -> tuple[int, ...]:
        """The shape of every clip's spectrogram."""
        return spectrogram_shape(self.config)


def _clip(item: Media) -> Audio:
    assert isinstance(item, Audio)
    return item


def spectrogram_shape(config: PretrainedConfig) -> tuple[int, int]:
    """Mels and frames of a clip's spectrogram.

    Args:
        config: the config of the whole model.
    """
    audio = config.audio_config
    return audio.num_mel_bins, 2 * audio.max_source_positions


def clip_arguments(spectrograms: Tensor, num_frames: Sequence[int]) -> dict[str, Tensor]:
    """The arguments of transformers' whole model for clips.

    Args:
        spectrograms: [clips, mels, frames].
        num_frames: frames of each clip, without those of silence that fill it up.
    """
    every = torch.arange(spectrograms.shape[2], device=spectrograms.device)
    heard = every < torch.tensor(num_frames, device=spectrograms.device)[:, None]
    return {"input_features": spectrograms, "feature_attention_mask": heard.long()}


def _num_positions(num_frames: int) -> int:
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
