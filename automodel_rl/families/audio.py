"""Audio encoders: from log-mel spectrograms to embeddings of the language model.

The supported ones derive from Whisper's (arXiv:2212.04356, section 2.2), followed by a pooling of two. Their
differences are in the files of their families.
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
    """An encoder in which a token is the mean of two positions, and a position covers two frames.

    Attributes:
        reader: reader of audio files.
    """

    component: ClassVar[EncoderName] = "audio"
    reader: type[AudioReader]

    @property
    def min_tokens(self) -> int:
        """Minimum tokens of a clip: transformers takes a single one for a prompt whose clips are not expanded."""
        return 2

    @property
    def min_frames(self) -> int:
        """Minimum frames of a clip with `min_tokens`."""
        return 4 * self.min_tokens - 1

    def num_tokens(self, num_frames: int) -> int:
        """Returns the number of tokens of a clip with `num_frames` frames, silent padding excluded."""
        return (positions_of(num_frames) - 2) // 2 + 1

    @abstractmethod
    def spectrogram(self, config: PretrainedConfig, num_frames: int) -> tuple[int, int]:
        """Returns the mels and frames of the spectrogram of a clip with `num_frames` frames, including any padding."""

    def blank(self, config: PretrainedConfig) -> Audio:
        frames = self.min_frames
        return Audio(0, self.min_tokens, frames, torch.zeros(self.spectrogram(config, frames)))

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
            """The silent padding is also filled with noise."""
            shortest = self.min_frames
            longest = min(shortest + 12, self.spectrogram(config, shortest + 12)[1])
            num_frames = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
            features = torch.randn(self.spectrogram(config, num_frames), generator=generator)
            return Audio(0, self.num_tokens(num_frames), num_frames, features)

        return {"audio": clip}

    def open_readers(self, folder: Path, config: PretrainedConfig, options: ReadingOptions) -> dict[str, MediaReader]:
        return {"audio": self.reader(folder, config, self)}


def frames_of(item: Media) -> int:
    """Frames of a clip, silent padding excluded."""
    assert isinstance(item, Audio)
    return item.num_frames


def positions_of(num_frames: Number) -> Number:
    """Number of positions in the encoder's layers: the second convolution has stride 2."""
    return (num_frames - 1) // 2 + 1
