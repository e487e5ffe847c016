"""Qwen2-Audio (arXiv:2407.10759): an encoder with a window of a fixed number of frames. Shorter clips are padded with
silence, which the frames of the clip do not attend to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import Media
from automodel_rl.families.audio import AudioEncoder, frames_of, positions_of
from automodel_rl.families.file_names import FileNames, parts_apart
from automodel_rl.families.multimodal import TEXT_MODELS, Multimodal
from automodel_rl.media.audio import AudioReader


class WindowReader(AudioReader):
    """Reads clips and pads them with silence."""

    def spectrogram(self, wave: np.ndarray, extractor: Any) -> np.ndarray:
        return extractor(wave, sampling_rate=self.rate, return_tensors="np")["input_features"][0]


@dataclass(frozen=True, kw_only=True)
class AudioWindows(AudioEncoder):
    """An encoder that processes windows of fixed length."""

    def spectrogram(self, config: PretrainedConfig, num_frames: int) -> tuple[int, int]:
        return config.audio_config.num_mel_bins, 2 * config.audio_config.max_source_positions

    def encode(self, model: Any, config: PretrainedConfig, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        num_frames = torch.tensor([frames_of(item) for item in media], device=loaded[0].device)
        longest = config.audio_config.max_source_positions
        is_heard = torch.arange(longest, device=num_frames.device) < positions_of(num_frames)[:, None]
        mask = is_heard[:, None, None, :].expand(-1, 1, longest, -1)
        hidden = model.audio_tower(torch.stack(list(loaded)), mask).last_hidden_state
        projected = model.multi_modal_projector(hidden)
        return torch.cat([rows[: item.num_tokens] for rows, item in zip(projected, media, strict=True)])

    def layer_output(self, layer: Any, hidden: Tensor, config: PretrainedConfig) -> Any:
        return layer(hidden[None], None)


_USUAL = parts_apart("audio_tower")

QWEN2_AUDIO = Multimodal(
    encoders={
        "audio": (
            AudioWindows(
                model_types=("qwen2_audio_encoder",),
                title="Qwen2-Audio's encoder",
                modules=("audio_tower", "multi_modal_projector"),
                projectors=("multi_modal_projector",),
                reader=WindowReader,
            ),
        )
    },
    # transformers 5 writes different names from those on the hub, and reads both.
    file_names=(
        _USUAL,
        FileNames(
            prefixes=(*_USUAL.prefixes[:2], ("model.", "language_model.model.model."), *_USUAL.prefixes[2:]),
            identifying_pattern=r"^language_model\.model\.model\.",
        ),
    ),
    languages=TEXT_MODELS,
)
