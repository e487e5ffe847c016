"""Audio of chats. Its length determines its number of tokens; samples are read on the rank that encodes it."""

import functools
import importlib
import io
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import Audio, Media
from automodel_rl.errors import InputError

LONGEST = 10**6
"""Maximum plausible seconds in a file's header: streaming encoders write the largest number if the length is
unknown."""

OPEN_END = 2**31
"""Size in a WAV header from which on it is meaningless: the file was written as a stream."""


class ClipSizes(Protocol):
    """Sizes of a model's audio clips.

    Attributes:
        min_tokens: minimum tokens of a clip.
        min_frames: minimum frames of a clip with that many tokens.
    """

    @property
    def min_tokens(self) -> int: ...

    @property
    def min_frames(self) -> int: ...

    def num_tokens(self, num_frames: int) -> int:
        """Returns the number of tokens of a clip with `num_frames` frames, silent padding excluded."""

    def spectrogram(self, config: PretrainedConfig, num_frames: int) -> tuple[int, int]:
        """Returns the mels and frames of the spectrogram of a clip with `num_frames` frames, including any padding."""


class AudioReader(ABC):
    """Reads audio clips in the form that a model takes.

    Args:
        folder: checkpoint folder with the feature extractor.
        config: config of the whole model.
        sizes: sizes of the model's clips.
    """

    def __init__(self, folder: Path, config: PretrainedConfig, sizes: ClipSizes):
        self.token_id, self.folder, self.sizes = config.audio_token_id, folder, sizes
        _library("soundfile")
        _library("soxr")
        try:
            extractor = _open_extractor(folder)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"model.path={folder}: no feature extractor that transformers can open ({reason})"
            ) from None
        from transformers import WhisperFeatureExtractor  # as in images.py

        if not isinstance(extractor, WhisperFeatureExtractor):
            raise InputError(
                f"model.path={folder}: the feature extractor is a {type(extractor).__name__}, not a "
                "WhisperFeatureExtractor: use the preprocessor_config.json that belongs to the model"
            )
        self.rate, self.hop = extractor.sampling_rate, extractor.hop_length
        self.max_frames = extractor.nb_max_frames
        made = (extractor.feature_size, self.max_frames)
        taken = sizes.spectrogram(config, self.max_frames)
        if made != taken:
            raise InputError(
                f"model.path={folder}: the feature extractor makes {made[0]} mels of {made[1]} frames, but the encoder "
                f"takes {taken[0]} of {taken[1]}: use the preprocessor_config.json that belongs to the model"
            )

    def __call__(self, source: Any, where: str) -> Audio:
        """Returns a clip whose samples are read later. `source` is a file path or the file's bytes."""
        if not isinstance(source, str | bytes):
            raise InputError(f"{where}: audio is a {type(source).__name__}: use the path of a file, or its bytes")
        num_frames = -(-self._num_samples(source, where) // self.hop)
        seconds = num_frames * self.hop / self.rate
        if num_frames > self.max_frames:
            most = self.max_frames * self.hop / self.rate
            raise InputError(f"{where}: audio of {seconds:.1f} s, but the model takes at most {most:g} s: cut the file")
        if num_frames < self.sizes.min_frames:
            raise InputError(
                f"{where}: audio of {seconds:.2f} s is shorter than {self.sizes.min_tokens} tokens: remove it"
            )
        features = functools.partial(self.load, source, where)
        return Audio(0, self.sizes.num_tokens(num_frames), num_frames, features, source)

    def token_ids(self, item: Media) -> Tensor:
        """Returns the tokens of a clip, int64 [n]."""
        return torch.full((item.num_tokens,), self.token_id)

    def load(self, source: str | bytes, where: str) -> Tensor:
        """Computes a clip's log-mel spectrogram [mels, frames] with the model's feature extractor."""
        return torch.as_tensor(self.spectrogram(self.samples(source, where), _open_extractor(self.folder)))

    @abstractmethod
    def spectrogram(self, wave: np.ndarray, extractor: Any) -> np.ndarray:
        """Computes the log-mel spectrogram [mels, frames] that the encoder takes, from samples at the model's sampling
        rate, float32 [n], with the model's `WhisperFeatureExtractor`."""

    def samples(self, source: str | bytes, where: str) -> np.ndarray:
        """Reads a clip as mono samples at the model's sampling rate, float32 [n]."""
        soundfile, soxr = _library("soundfile"), _library("soxr")
        try:
            wave, rate = soundfile.read(_file(source), dtype="float32", always_2d=True)
        except (OSError, soundfile.SoundFileError) as error:
            raise _unreadable(source, where, error) from None
        if not np.isfinite(wave).all():
            raise InputError(f"{where}: the audio {_name(source)} has NaN or infinite samples: use an intact file")
        wave = soxr.resample(wave.mean(axis=1), rate, self.rate)
        wanted = self._num_samples(source, where)
        if wanted - len(wave) > self.hop:  # a resampler may return one sample more or less
            raise InputError(
                f"{where}: the audio {_name(source)} ends after {len(wave) / self.rate:.2f} s of "
                f"{wanted / self.rate:.2f}: use an intact file"
            )
        return np.pad(wave[:wanted], (0, max(0, wanted - len(wave))))

    def _num_samples(self, source: str | bytes, where: str) -> int:
        """Returns the number of samples at the model's sampling rate, from the file's header."""
        soundfile = _library("soundfile")
        try:
            info = soundfile.info(_file(source))
        except (OSError, soundfile.SoundFileError) as error:
            raise _unreadable(source, where, error) from None
        if info.frames > LONGEST * info.samplerate:
            raise InputError(f"{where}: the audio {_name(source)} does not contain its length: rewrite the file")
        if _is_cut(source):
            raise InputError(f"{where}: the audio {_name(source)} is shorter than its header says: use an intact file")
        return -(-info.frames * self.rate // info.samplerate)


@functools.cache
def _open_extractor(folder: Path) -> Any:
    """Opens the checkpoint's feature extractor. Its filters are large, so it is not pickled with clips."""
    from transformers import AutoFeatureExtractor  # as in images.py

    return AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=False)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(f"audio needs the package {name}: pip install 'automodel-rl[audio]'") from None


def _file(source: str | bytes) -> Any:
    return source if isinstance(source, str) else io.BytesIO(source)


def _is_cut(source: str | bytes) -> bool:
    """Whether a WAV file is shorter than its header states. Readers accept such files, but reject truncated files of
    other formats."""
    head, size = (
        (source[:8], len(source)) if isinstance(source, bytes) else (_head(source), Path(source).stat().st_size)
    )
    said = int.from_bytes(head[4:8], "little")
    return head[:4] == b"RIFF" and 0 < said < OPEN_END and said + 8 > size + 1  # the last padding byte may be missing


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(8)


def _name(source: str | bytes) -> str:
    return source if isinstance(source, str) else "in its bytes"


def _unreadable(source: str | bytes, where: str, error: Exception) -> InputError:
    return InputError(f"{where}: cannot read the audio {_name(source)} ({error}): use an intact file")
