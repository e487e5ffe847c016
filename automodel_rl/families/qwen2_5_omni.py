"""Qwen2.5-Omni (arXiv:2503.20215): the thinker, with images, videos, and audio of any length, in chunks that do not
attend to each other (section 2.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import Media
from automodel_rl.families.audio import AudioEncoder, frames_of, positions_of
from automodel_rl.families.family import Family
from automodel_rl.families.file_names import FileNames
from automodel_rl.families.multimodal import Multimodal
from automodel_rl.families.patch_images import PatchImages
from automodel_rl.media.audio import AudioReader
from automodel_rl.media.videos import VideoReader


class ChunkReader(AudioReader):
    """Reads clips of any length."""

    def spectrogram(self, wave: np.ndarray, extractor: Any) -> np.ndarray:
        # Pad with silence like the model's processor, so that the last frames are equal.
        num_frames = -(-len(wave) // self.hop)
        length = min(self.hop * num_frames + extractor.n_fft, extractor.n_samples)
        made = extractor(wave, sampling_rate=self.rate, max_length=length, return_tensors="np")
        return made["input_features"][0][:, :num_frames]


@dataclass(frozen=True, kw_only=True)
class AudioChunks(AudioEncoder):
    """An encoder that processes clips in chunks."""

    def spectrogram(self, config: PretrainedConfig, num_frames: int) -> tuple[int, int]:
        return config.audio_config.num_mel_bins, num_frames

    def encode(self, model: Any, config: PretrainedConfig, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        num_frames = torch.tensor([frames_of(item) for item in media], device=loaded[0].device)
        joined = torch.cat(list(loaded), dim=1)
        return model.audio_tower(joined, num_frames, positions_of(num_frames)).last_hidden_state

    def layer_output(self, layer: Any, hidden: Tensor, config: PretrainedConfig) -> Any:
        bounds = hidden.new_empty(2, dtype=torch.int32)
        return layer(hidden, bounds, max_seqlen=2 * config.audio_config.n_window)


QWEN2_5_OMNI = Multimodal(
    encoders={
        "vision": (
            PatchImages(
                model_types=("qwen2_5_omni_vision_encoder",),
                title="Qwen2.5-Omni's encoder",
                modules=("visual",),
                projectors=("visual.merger",),
                videos=VideoReader,
            ),
        ),
        "audio": (
            AudioChunks(
                model_types=("qwen2_5_omni_audio_encoder",),
                title="Qwen2.5-Omni's encoder",
                modules=("audio_tower",),
                projectors=("audio_tower.proj",),
                varlen_module="audio_tower",
                reader=ChunkReader,
            ),
        ),
    },
    file_names=(
        FileNames(prefixes=(("model.visual.", "visual."), ("model.audio_tower.", "audio_tower."))),
        FileNames(
            prefixes=(
                ("model.visual.", "thinker.visual."),
                ("model.audio_tower.", "thinker.audio_tower."),
                ("", "thinker."),
            ),
            identifying_pattern=r"^thinker\.",
        ),
    ),
    own_languages={"qwen2_5_omni_text": Family(rotary_axes=3)},
    part_of=("qwen2_5_omni", "thinker_config"),
    has_rotary_grid=True,
    text_follows_time=True,
    has_peft_names=False,
)
