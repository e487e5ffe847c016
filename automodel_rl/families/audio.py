"""Encoders of audio: log-mel spectrograms in, embeddings of the language model out.

Those that are here come from Whisper's (arXiv:2212.04356, section 2.2) with a pooling of two after it. What differs is
in the files of their families.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from automodel_rl.batch.media import Audio, EncoderName, Media
from automodel_rl.families.encoder import EncoderFamily, MediaReader, ReadingOptions
from automodel_rl.media.audio import AudioReader

Number = TypeVar("Number", int, Tensor)


@dataclass(frozen=True, kw_only=True)
class AudioEncoder(EncoderFamily):
    """An encoder whose tokens are each the mean of two positions of its layers, and a position is of two frames.

    Attributes:
        reader: reads files of audio.
    """

    component: ClassVar[EncoderName] = "audio"
    reader: type[AudioReader]

    @property
    def least_tokens(self) -> int:
        """Fewest tokens of a clip: transformers takes a single one for a prompt whose clips are not expanded."""
        return 2

    @property
    def least_frames(self) -> int:
        """The fewest frames of a clip with `least_tokens`."""
        return 4 * self.least_tokens - 1

    def num_tokens(self, num_frames: int) -> int:
        """Number of tokens of a clip.

        Args:
            num_frames: frames of its spectrogram, without those of silence that fill it up.
        """
        return (positions_of(num_frames) - 2) // 2 + 1

    @abstractmethod
    def spectrogram(self, config: PretrainedConfig, num_frames: int) -> tuple[int, int]:
        """Mels and frames of a clip's spectrogram.

        Args:
            config: the config of the whole model.
            num_frames: frames of the clip itself.
        """

    def blank(self, config: PretrainedConfig) -> Audio:
        frames = self.least_frames
        return Audio(0, self.least_tokens, frames, torch.zeros(self.spectrogram(config, frames)))

    def shape(self, config: PretrainedConfig, item: Media) -> tuple[int, ...]:
        return self.spectrogram(config, frames_of(item))

    def num_positions(self, config: PretrainedConfig, item: Media) -> int:
        return positions_of(self.shape(config, item)[1])

    def arguments(
        self, config: PretrainedConfig, media: Sequence[Media], token_ids: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        spectrograms = [clip.load().to(token_ids.device, dtype) for clip in media]
        longest = max(spectrogram.shape[1] for spectrogram in spectrograms)
        padded = torch.stack([pad(spectrogram, (0, longest - spectrogram.shape[1])) for spectrogram in spectrograms])
        num_frames = torch.tensor([frames_of(clip) for clip in media], device=token_ids.device)
        heard = torch.arange(longest, device=token_ids.device) < num_frames[:, None]
        return {"input_features": padded, "feature_attention_mask": heard.long()}

    def random(self, config: PretrainedConfig, generator: torch.Generator) -> dict[str, Callable[[], Media]]:
        def clip() -> Audio:
            """Noise stands also in the place of the silence that fills a clip up."""
            shortest = self.least_frames
            longest = min(shortest + 12, self.spectrogram(config, shortest + 12)[1])
            num_frames = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
            features = torch.randn(self.spectrogram(config, num_frames), generator=generator)
            return Audio(0, self.num_tokens(num_frames), num_frames, features)

        return {"audio": clip}

    def open_readers(self, folder: Path, config: PretrainedConfig, options: ReadingOptions) -> dict[str, MediaReader]:
        return {"audio": self.reader(folder, config, self)}


def frames_of(item: Media) -> int:
    """Frames of a clip, without those of silence that fill it up."""
    assert isinstance(item, Audio)
    return item.num_frames


def positions_of(num_frames: Number) -> Number:
    """Number of positions of the encoder's layers: the second convolution takes every other frame."""
    return (num_frames - 1) // 2 + 1
