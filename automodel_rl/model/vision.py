"""The encoder of a vision-language model as a module of its own: pixels in, embeddings of the language model out.

Both parts consist of transformers' own modules. `LanguagePart` has the names of a causal language model, so the rest of
the package treats it as one. `VisionPart` is what is left of the inner model without its language model.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig

from automodel_rl.batch import Image
from automodel_rl.compat.modules import set_attention
from automodel_rl.config import ModelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.lora.add import Encoder
from automodel_rl.lora.layers import install_adapters
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.encoder_stages import OtherLayer, StageLink, split_encoder
from automodel_rl.model.fused_norm import install_fused_norms
from automodel_rl.model.parallelise import dtypes_of, mixed_precision
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import wrap_fsdp
from automodel_rl.parallel.tensor_parallel import TensorParallel, split_linears
from automodel_rl.support.description import ImageForm, image_form, language_config, num_deepstack
from automodel_rl.support.families import VISION_FAMILIES


class LanguagePart(nn.Module):
    """The language model of a vision-language model, with the names of a causal language model.

    Args:
        whole: transformers' model for conditional generation.
        config: the language model's config.
    """

    def __init__(self, whole: Any, config: PretrainedConfig):
        super().__init__()
        self.config, self.model, self.lm_head = config, whole.model.language_model, whole.lm_head


class VisionPart(nn.Module):
    """The encoder with its projector. Its forward is called through FSDP's hooks, a few images at a time.

    Args:
        whole: transformers' model for conditional generation, whose language model is taken out.
    """

    def __init__(self, whole: Any):
        super().__init__()
        self.config, self.model = whole.config, whole.model
        self.model.language_model = None
        self.link: StageLink | None = None

    def forward(self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, int, int]]) -> Tensor | list[Tensor]:
        """Embeddings of the tokens of all images, in order.

        Args:
            pixels: the pixels of each image, as the image processor gives them, on the device and in the compute dtype;
                of a single one for `ImageForm.ANY_SIZE`.
            grids: number of patches of each image in time, height and width.

        Returns:
            [m, H] in the compute dtype, or [m, (1 + D) * H] if features follow each embedding (batch/images.py). On
            pipeline stages before the last, what they give to the next.
        """
        if self.link is None:
            return self._embeddings(pixels, grids)
        embeddings = self._embeddings(pixels, grids)
        given, self.link.given = self.link.given, []
        return given or embeddings

    def _embeddings(self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, int, int]]) -> Tensor:
        form = image_form(self.config)
        if form is ImageForm.PATCHES:
            grid = torch.tensor(grids, device=pixels[0].device)
            output = self.model.get_image_features(torch.cat(list(pixels)), grid)
            features = output.deepstack_features if num_deepstack(self.config) else []
            return torch.cat([torch.cat(list(of_images)) for of_images in (output.pooler_output, *features)], dim=1)
        if form is ImageForm.ANY_SIZE:
            (image,) = pixels  # one by one (step/encoding.py)
            return self._alone(image)
        return torch.cat(list(self.model.get_image_features(torch.stack(list(pixels))).pooler_output))

    def _alone(self, image: Tensor) -> Tensor:
        """The embeddings of one image [C, H, W]."""
        side = token_patches(self.config) * self.config.vision_config.patch_size
        copies = 2 if image.shape[-2:] == (side, side) else 1  # transformers 5.18 loses a dim of a single token
        sizes = torch.tensor([image.shape[-2:]] * copies)
        return self.model.get_image_features(torch.stack([image] * copies), image_sizes=sizes).pooler_output[0]


def language_model(whole: Any) -> Any:
    """The language model of transformers' model for conditional generation, with the names of a causal language model;
    a causal language model itself."""
    if whole.config.model_type not in VISION_FAMILIES:
        return whole
    return LanguagePart(whole, language_config(whole.config))


def split_modules(whole: Any, config: PretrainedConfig) -> tuple[LanguagePart, VisionPart]:
    """The two parts of a vision-language model, which share no weight.

    Args:
        whole: transformers' model for conditional generation; may be without storage.
        config: the language model's config.
    """
    return LanguagePart(whole, config), VisionPart(whole)


VARLEN = "automodel_rl_flash_varlen"
"""Name under which transformers knows `varlen_attention`. As it contains "flash", encoders pass images of different
sizes in one call, not one by one."""


def choose_attention(part: VisionPart, device: torch.device, dtype: torch.dtype) -> None:
    """Makes an encoder of images of different sizes compute attention in one call for all, in bfloat16 on CUDA."""
    is_ragged = image_form(part.config) is ImageForm.PATCHES  # others see images as a batch, or one by one
    if is_ragged and device.type == "cuda" and dtype == torch.bfloat16:
        AttentionInterface.register(VARLEN, varlen_attention)
        # Set only now: while the model is built, transformers takes the name for that of a kernel on the hub.
        set_attention(part.model.visual.config, VARLEN)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """torch's varlen_attn with full attention in each segment, in transformers' signature. CUDA and 16-bit types.

    Args:
        query, key, value: [1, heads, n, D].
        cu_seq_lens_q: the starts of the segments, and n at the end, int32.
        max_length_q: length of the longest segment.

    Returns:
        [1, n, heads, D], and no attention weights.
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=(-1, -1)
    )
    assert isinstance(output, Tensor)  # a tuple only when auxiliary outputs are asked for
    return output[None], None


def encoder_of(part: VisionPart) -> Encoder:
    """The encoder as adapters see it."""
    return Encoder(part, tuple(f"model.{name}" for name in VISION_FAMILIES[part.config.model_type].projectors))


def freeze(language: LanguagePart, vision: VisionPart, frozen: Sequence[str]) -> None:
    """Freezes the parts that `ModelConfig.frozen` names."""
    names = VISION_FAMILIES[vision.config.model_type].projectors
    kept = {parameter for name in names for parameter in vision.model.get_submodule(name).parameters()}
    for name, parameters in (
        ("vision", [parameter for parameter in vision.parameters() if parameter not in kept]),
        ("projector", list(kept)),
        ("language", list(language.parameters())),
    ):
        for parameter in parameters if name in frozen else []:
            parameter.requires_grad_(False)


def parallelise_encoder(
    part: VisionPart, layout: Layout, model: ModelConfig, memory: MemoryConfig
) -> list[tuple[nn.Module, str]]:
    """Lays out the encoder over ranks, in place: its linear layers over tp, the rest with FSDP.

    Args:
        part: the encoder, on the meta device except for its buffers.
        layout: the encoder's layout; on a stage of a pipeline the part keeps that stage's layers only.
        model: the model's config, for its precision.
        memory: what is recomputed.

    Returns:
        Parameters, as (module, name), for which each tp rank's gradient is only a summand.
    """
    split_part(part, dtypes_of(model)[0], layout.pp_rank, layout.parallel.pp)
    partial: list[tuple[nn.Module, str]] = []
    if layout.parallel.tp > 1:
        names = VISION_FAMILIES[part.config.model_type]
        how = TensorParallel(layout.tp_group, sequence_parallel=False)
        partial = split_linears(part, names.tp_style, layout.mesh["tp"], how)
    compute, _ = dtypes_of(model)
    install_adapters(part)
    choose_attention(part, layout.device, compute)
    install_fused_norms(part, [], layout.device, compute)
    layers = encoder_layers(part)
    checkpoint_layers(layers, memory.activation_checkpointing)
    wrap_fsdp(part, layers, [], layout.fsdp_mesh, mixed_precision(model))
    return partial


def encoder_layers(part: VisionPart) -> list[Any]:
    """This rank's layers of the encoder."""
    return [layer for layer in _longest_list(part) if not isinstance(layer, OtherLayer)]


def _longest_list(part: VisionPart) -> nn.ModuleList:
    return max((module for module in part.modules() if isinstance(module, nn.ModuleList)), key=len)


def split_part(part: VisionPart, dtype: torch.dtype, stage: int, stages: int) -> None:
    """Leaves one pipeline stage of the encoder in its part, in place. A single stage changes nothing.

    Args:
        part: the encoder, on the meta device except for its buffers.
        dtype: the dtype in which it computes.
        stage, stages: number of the stage, and of all stages.
    """
    if stages == 1:
        return
    features = None
    if num_deepstack(part.config):
        features = part.model.visual.deepstack_merger_list, part.config.vision_config.deepstack_visual_indexes
    part.link = split_encoder(part.model, _longest_list(part), features, dtype, stage, stages)


def blank_image(config: PretrainedConfig) -> Image:
    """The smallest image of a model. A rank of the encoder without images encodes it to join its peers' collectives.

    Args:
        config: the config of the whole model.
    """
    vision = config.vision_config
    if image_form(config) is ImageForm.PATCHES:
        size = token_patches(config)
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return Image(0, 1, (1, size, size), torch.zeros(size * size, patch))
    if image_form(config) is ImageForm.ANY_SIZE:
        merge = token_patches(config)
        side = merge * vision.patch_size
        return Image(0, 2, (1, merge, merge), torch.zeros(vision.num_channels, side, side), row=1)
    side = vision.image_size
    grid = side // vision.patch_size
    pixels = torch.zeros(vision.num_channels, side, side)
    pooled = config.to_dict().get("mm_tokens_per_image")
    if pooled is not None:
        is_bidirectional = VISION_FAMILIES[config.model_type].is_bidirectional
        return Image(0, pooled, (1, grid, grid), pixels, is_bidirectional=is_bidirectional)
    has_class_token = vision.model_type == "clip_vision_model"  # "default" leaves out the first token, whatever it is
    tokens = grid * grid + has_class_token - (config.vision_feature_select_strategy == "default")
    return Image(0, tokens, (1, grid, grid), pixels)


def pixel_shape(config: PretrainedConfig, blank: Image, grid: tuple[int, int, int]) -> tuple[int, ...]:
    """The shape of an image's pixels by its grid.

    Args:
        config: the config of the whole model.
        blank: the model's `blank_image`.
        grid: its patches in time, height and width.
    """
    shape = blank.load().shape
    if image_form(config) is ImageForm.PATCHES:
        return math.prod(grid), shape[1]
    if image_form(config) is ImageForm.ANY_SIZE:
        return shape[0], *(patches * config.vision_config.patch_size for patches in grid[1:])
    return tuple(shape)


def token_patches(config: PretrainedConfig) -> int:
    """Patches in a token along height, and along width.

    Args:
        config: the config of the whole model.
    """
    values = config.to_dict()
    return values["vision_config"].get("spatial_merge_size") or values.get("spatial_merge_size") or 1


def rotary_merge(config: PretrainedConfig) -> int | None:
    """Patches in a token along height, and along width, if rotary positions follow an image's grid; else None."""
    vision = VISION_FAMILIES.get(config.model_type)
    return config.vision_config.spatial_merge_size if vision is not None and vision.has_rotary_grid else None
