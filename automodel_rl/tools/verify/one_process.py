"""Reference of every comparison: plain transformers in one process, one sequence at a time, with plain optimizers.

It shares no code with the layout; the optimizers' reference steps are also written independently.
"""

import functools
import inspect
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from automodel_rl.batch import Audio, Image, Routes, TokenSequence, Video
from automodel_rl.config import MuonConfig, OptimizerConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.families.family import Family
from automodel_rl.families.known import MULTIMODAL_FAMILIES, checkpoint_family
from automodel_rl.mixture.routers import RouterOutput, in_order, in_order_of
from automodel_rl.optimizers import LR_FACTOR, OPTIMIZERS
from automodel_rl.tools.verify.media import clips_of, with_media
from automodel_rl.tools.verify.reference_routers import routed


def rounded(weight: Tensor, step: int, name: str) -> Tensor:
    """Rounds a whole weight stochastically to bfloat16 values, as a step does.

    Args:
        weight: float64 [..., I].
        step: step number, from 1.
        name: the weight's name.

    Returns:
        bfloat16 values as float64 [..., I].
    """
    values = weight.detach().cpu().numpy()
    fraction, exponent = np.frexp(values)
    near_zero = np.trunc(fraction * 2**8)  # bfloat16 has 8 significant bits, one of them implicit
    share = np.abs(fraction * 2**8 - near_zero)
    goes_away = share + _numbers(values.shape, step, name) / 2**16 >= 1
    found = np.ldexp(near_zero + np.sign(values) * goes_away, exponent - 8)
    return torch.from_numpy(found).to(weight.device)


def _numbers(shape: tuple[int, ...], step: int, name: str) -> np.ndarray:
    """Random integers in [0, 2^16) for each entry of a weight in a step."""
    is_end = name.endswith(("lm_head.weight", "embed_tokens.weight"))
    key = np.uint32((zlib.crc32(f"{step} {'' if is_end else name}".encode()) + 2**31) % 2**32)
    rows = np.arange(np.prod(shape[:-1], dtype=np.int64), dtype=np.uint32)
    columns = np.arange(shape[-1], dtype=np.uint32) * np.uint32(0x9E3779B1)
    return (_murmur3(_murmur3(rows ^ key)[:, None] + columns) >> np.uint32(16)).reshape(shape)


def _murmur3(numbers: np.ndarray) -> np.ndarray:
    """32-bit finalizer of MurmurHash3 (github.com/aappleby/smhasher), uint32."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        numbers = (numbers ^ (numbers >> np.uint32(shift))) * np.uint32(factor)
    return numbers


EXAMPLE = 16
"""Length of the example sequences that show how parameters are used."""

EXAMPLE_SEEDS = (2, 4)
"""Seeds for which the examples have media of every kind."""


def reference_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of one sequence, entirely in the inputs' dtype. transformers' eager attention has its softmax in
    fp32."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(query.shape[2], device=query.device)
    distance = place[:, None] - place[None]
    hidden = (distance < 0) | (distance >= (sliding_window or len(place)))
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.exp()[None, :, None, None]
    return (weights / total @ value).transpose(1, 2), None


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """Gated delta rule (arXiv:2412.06464, eq. 10), token by token in float64, with the signature of transformers'
    function, which computes in fp32.

    Queries and keys are [1, n, heads, K], values [1, n, heads, V], rates `beta` [1, n, heads]. Log decays `g` are
    [1, n, heads], or [1, n, heads, K] for Kimi Delta Attention (arXiv:2510.26692). Returns the outputs and the last
    state.
    """
    q, k, v, decay, rate = (tensor.double().squeeze(0) for tensor in (query, key, value, g, beta))
    # Before 5.23, transformers repeats queries and keys for the value heads outside this function.
    q, k = (tensor.repeat_interleave(v.shape[1] // tensor.shape[1], dim=1) for tensor in (q, k))
    q, k = (tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6) for tensor in (q, k))
    state, outputs = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for n in range(len(q)):
        state = state * decay[n].exp().reshape(len(state), -1, 1)
        missing = v[n] - torch.einsum("hkv,hk->hv", state, k[n])
        state = state + torch.einsum("hk,hv->hkv", k[n], missing * rate[n][:, None])
        outputs.append(torch.einsum("hkv,hk->hv", state, q[n]) / q.shape[-1] ** 0.5)
    return torch.stack(outputs)[None].to(query.dtype), state[None]


def state_space(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2 state space (arXiv:2405.21060, eq. 2), token by token in float64, with the signature of transformers'
    function, which computes in fp32.

    Inputs are [1, n, heads, P], steps `dt` [1, n, heads], decay rates `A` [heads], `B` and `C` [1, n, groups, N].
    Returns the outputs, and the last state if requested.
    """
    x, step, b, c = (tensor.double().squeeze(0) for tensor in (hidden_states, dt, B, C))
    step = torch.nn.functional.softplus(step + dt_bias.double()).clamp(*dt_limit)
    b, c = (tensor.repeat_interleave(x.shape[1] // tensor.shape[1], dim=1) for tensor in (b, c))
    state, outputs = x.new_zeros(x.shape[1], x.shape[2], b.shape[2]), []
    for n in range(len(x)):
        decay = (A.double() * step[n]).exp()[:, None, None]
        state = decay * state + torch.einsum("hp,hn->hpn", x[n] * step[n][:, None], b[n])
        outputs.append(torch.einsum("hpn,hn->hp", state, c[n]) + D.double()[:, None] * x[n])
    found = torch.stack(outputs)[None].to(hidden_states.dtype)
    return (found, state[None]) if return_final_states else found


def compute_rule_in_float64(layer: Any) -> None:
    """Rebinds the forward of a transformers layer with a recurrent state, so that it calls `delta_rule` or
    `state_space`."""
    plain = inspect.unwrap(type(layer).forward)
    rules = {
        "torch_chunk_gated_delta_rule": delta_rule,
        "chunk_kimi_delta_attention": delta_rule,
        "mamba2_chunk_scan": state_space,
    }
    names = {**plain.__globals__, **rules}
    layer.forward = MethodType(FunctionType(plain.__code__, names, argdefs=plain.__defaults__), layer)


@dataclass(frozen=True)
class Training:
    """Training settings. The learning rate is constant by default.

    Attributes:
        lr, betas, eps, weight_decay, max_grad_norm, warmup_steps, muon: as in `OptimizerConfig`.
        total_steps: step at which the rate, falling linearly after the warm-up, would reach 0; None for a constant
            rate.
        aux_loss: weight of the load-balancing loss, which is computed per microbatch.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.5
    warmup_steps: int = 0
    total_steps: int | None = None
    aux_loss: float = 0.0
    optimizer: OptimizerName = "adamw"
    muon: MuonConfig = field(default_factory=MuonConfig)

    @property
    def config(self) -> OptimizerConfig:
        return OptimizerConfig(
            name=self.optimizer,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            warmup_steps=self.warmup_steps,
            decay="constant" if self.total_steps is None else "linear",
            muon=self.muon,
        )

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.lr
        return self.lr * (1 - (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))


class OneProcess:
    """A transformers model trained with gradient clipping.

    Args:
        dtype: dtype of weights and computation.
        device: must be the layout's device for an exact comparison: transformers computes norms and rotary
            embeddings in fp32 even in a float64 model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, training: Training, device: torch.device):
        AttentionInterface.register("reference_attention", reference_attention)
        AttentionMaskInterface.register("reference_attention", lambda *args, **kwargs: None)
        whole = AutoConfig.from_pretrained(folder)
        config = whole.to_dict()
        # transformers' sdpa ignores soft caps and sinks.
        named = checkpoint_family(whole)
        self.family, self.files_transpose_experts = named.language, named.file_names.files_transpose_experts
        plain = config.get("attn_logit_softcapping") is None and not self.family.has_sinks
        has_encoder = named.is_multimodal
        kind = AutoModelForMultimodalLM if has_encoder else AutoModelForCausalLM
        model = kind.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="sdpa" if plain else "reference_attention",
            experts_implementation="eager",
        )
        for name, module in model.named_modules():
            has_convolution = "conv1d" in dict(module.named_children())
            if has_convolution and name.endswith((".linear_attn", ".self_attn", ".mamba", ".mixer")):
                compute_rule_in_float64(module)
        self.takes_grids = "image_grid_thw" in signature(model.forward).parameters
        self.takes_types = "mm_token_type_ids" in signature(model.forward).parameters
        self.seconds = "second_per_grid_ts" if self.takes_types else "video_second_per_grid"
        self.positions_per_second = (config.get("vision_config") or {}).get("tokens_per_second") or config.get(
            "position_id_per_seconds"
        )
        self.takes_places = "image_position_ids" in signature(model.forward).parameters
        self.takes_kinds = "token_type_ids" in signature(model.forward).parameters
        self.model, self.device = model.to(device), device
        self.training, self.num_steps = training, 0
        self._in_bfloat16: dict[Tensor, str] = {}  # the parameters' names
        self._steps_of: Counter[Tensor] = Counter()
        self.routes: Routes | None = None  # routes of the current sequence
        # Logits and chosen experts of a microbatch's sequences, by layer.
        self.routed: dict[int, list[tuple[Tensor, Tensor]]] = {}
        body = self.model.get_decoder()
        if self.family.is_moe:
            for number, layer in enumerate(body.layers):
                block = dict(layer.named_modules()).get(self.family.block)
                if block is not None and "experts" in dict(block.named_children()):  # not a dense layer
                    self._follow_routes(number, block.get_submodule(self.family.router), self.family)

    def _follow_routes(self, number: int, router: Any, family: Family) -> None:

        def hook(module: Any, inputs: tuple[Tensor, ...], output: RouterOutput) -> RouterOutput:
            ordered = in_order(output)
            if self.routes is not None:
                ordered = routed(family, module, inputs[0], ordered[2], self.routes.of(number).long())
            assert ordered[0] is not None  # transformers' routers return their scores
            self.routed.setdefault(number, []).append((ordered[0], ordered[2]))
            return in_order_of(output, ordered)

        router.register_forward_hook(hook)

    def freeze(self, names: set[str]) -> None:
        for name, parameter in self.parameters():
            parameter.requires_grad_(name not in names)

    def keep_in_bfloat16(self, names: set[str]) -> None:
        """Keeps the named parameters in bfloat16 values, rounding them again after each step."""
        for name, parameter in self.parameters():
            if name in names:
                self._in_bfloat16[parameter] = name
                parameter.data.copy_(parameter.data.bfloat16())

    @functools.cached_property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return OPTIMIZERS[self.training.optimizer].reference(self.model, self.training.config, self.run_examples)

    def run_examples(self) -> list[Tensor]:
        """Returns the logits of example sequences that involve every parameter."""
        texts = [TokenSequence(torch.arange(EXAMPLE), torch.ones(EXAMPLE, dtype=torch.bool))] * len(EXAMPLE_SEEDS)
        if self.model.config.model_type in MULTIMODAL_FAMILIES:
            pairs = zip(texts, EXAMPLE_SEEDS, strict=True)
            texts = [with_media(sequence, self.model.config, seed) for sequence, seed in pairs]
        self.routes = None
        logits = [self._logits(sequence) for sequence in texts]
        self.routed = {}
        return logits

    def _logits(self, sequence: TokenSequence) -> Tensor:
        return self.model(sequence.input_ids.to(self.device)[None], **self._media(sequence)).logits

    def logprobs(self, sequence: TokenSequence) -> Tensor:
        """Log-probabilities of a sequence's tokens, [n], aligned with the tokens; the first entry is 0."""
        self.routes = sequence.routes
        ids = sequence.input_ids.to(self.device)
        logits = self._logits(sequence)[0, :-1]
        scores = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return torch.cat([scores.new_zeros(1), scores])

    def _media(self, sequence: TokenSequence) -> dict[str, Any]:
        dtype = next(self.model.parameters()).dtype
        found: dict[str, Any] = {}
        if any(isinstance(item, Audio) for item in sequence.media):
            found = self._clips(*clips_of(sequence), dtype)
        videos = [item for item in sequence.media if isinstance(item, Video)]
        images = [item for item in sequence.media if isinstance(item, Image) and not isinstance(item, Video)]
        if videos:
            found |= {
                "pixel_values_videos": torch.cat([video.load() for video in videos]).to(self.device, dtype),
                "video_grid_thw": torch.tensor([video.grid for video in videos], device=self.device),
            }
            if self.positions_per_second is not None:
                found[self.seconds] = torch.tensor([video.interval / self.positions_per_second for video in videos])
        if images:
            found |= self._images(sequence, images, dtype)
        if not (self.takes_grids and (images or videos)):
            return found
        # Some models locate images and videos by token types, others by surrounding tokens under the attention mask.
        if not self.takes_types:
            return found | {"attention_mask": torch.ones_like(sequence.input_ids)[None].to(self.device)}
        kinds = torch.zeros_like(sequence.input_ids, dtype=torch.int32)
        for item in sequence.media:
            kinds[item.start : item.start + item.num_tokens] = 2 if isinstance(item, Video) else 1
        return found | {"mm_token_type_ids": kinds[None].to(self.device)}

    def _clips(self, spectrograms: list[Tensor], num_frames: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
        """Spectrograms padded to the longest, and the mask of valid frames."""
        rows = [spectrogram.mT.to(self.device, dtype) for spectrogram in spectrograms]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).mT
        mask = torch.zeros(len(rows), padded.shape[2], dtype=torch.int64, device=self.device)
        for row, count in zip(mask, num_frames, strict=True):
            row[:count] = 1
        return {"input_features": padded, "feature_attention_mask": mask}

    def _images(self, sequence: TokenSequence, images: list[Image], dtype: torch.dtype) -> dict[str, Any]:
        pixels = [image.load().to(self.device, dtype) for image in images]
        if self.takes_places:
            return self._placed(sequence, images, pixels)
        if pixels[0].ndim == 4:  # tiles of each image
            return {"pixel_values": torch.cat(pixels)}
        if self.takes_kinds:
            kinds = (sequence.input_ids == self.model.config.image_token_id).int()[None].to(self.device)
            return {"pixel_values": torch.stack(pixels), "token_type_ids": kinds}
        if not self.takes_grids and len({image.shape for image in pixels}) == 1 and not images[0].row:
            return {"pixel_values": torch.stack(pixels)}
        if not self.takes_grids:  # padded to one size, as transformers' image processor does
            sizes = torch.tensor([image.shape[-2:] for image in pixels], device=self.device)
            height, width = sizes.amax(0).tolist()
            padded = [torch.nn.functional.pad(i, (0, width - i.shape[2], 0, height - i.shape[1])) for i in pixels]
            return {"pixel_values": torch.stack(padded), "image_sizes": sizes}
        grids = torch.tensor([image.grid for image in images], device=self.device)
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": grids}

    def _placed(self, sequence: TokenSequence, images: list[Image], pixels: list[Tensor]) -> dict[str, Any]:
        """Encodes patches at their x and y positions. Each image is encoded alone: batching changes the rounding,
        which many layers amplify."""
        embeddings = []
        for image, patches in zip(images, pixels, strict=True):
            places = [(x, y) for y in range(image.grid[1]) for x in range(image.grid[2])]
            encoded = self.model.get_image_features(patches[None], torch.tensor([places], device=self.device))
            embeddings += encoded.pooler_output
        bidirectional = self.model.config.text_config.use_bidirectional_attention == "vision"
        return {
            **({"attention_mask": self._masks(sequence, images)} if bidirectional else {}),
            "mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=tuple(embeddings))},
        }

    def _masks(self, sequence: TokenSequence, images: list[Image]) -> dict[str, Tensor]:
        """Masks [1, 1, n, n] of the keys that each query sees, by layer type. Only sliding-window layers see later
        tokens of the same image, as in Google's code; in transformers 5.18 the class of the unified model lets all
        layers do so."""
        place = torch.arange(len(sequence))
        ahead = place[None] - place[:, None]
        image_of = torch.full((len(sequence),), -1)
        for number, image in enumerate(images):
            image_of[image.start : image.start + image.num_tokens] = number
        of_same = (image_of[:, None] == image_of[None]) & (image_of >= 0)
        within = ahead > -self.model.config.text_config.sliding_window
        masks = {"full_attention": ahead <= 0, "sliding_attention": ((ahead <= 0) | of_same) & within}
        return {kind: mask[None, None].to(self.device) for kind, mask in masks.items()}

    def backward(self, microbatches: list[list[TokenSequence]]) -> float:
        """Computes gradients. Returns the loss: the mean over all trained tokens of all microbatches."""
        sequences = [sequence for microbatch in microbatches for sequence in microbatch]
        num_tokens = sum(int(s.loss_mask[1:].sum()) for s in sequences)
        total = 0.0
        for microbatch in microbatches:
            self.routed = {}
            losses = [self._summed(sequence) / num_tokens for sequence in microbatch]
            total += sum(loss.item() for loss in losses)
            if self.training.aux_loss:
                losses.append(self._load_balancing() * (self.training.aux_loss / sum(map(len, sequences))))
            trained = [
                loss for loss in losses if loss.requires_grad
            ]  # text gives no gradient if only the encoder is trained
            if trained:
                torch.stack(trained).sum().backward()
        self.routed = {}
        return total

    def _summed(self, sequence: TokenSequence) -> Tensor:
        counted = sequence.loss_mask.to(self.device, copy=True)
        counted[0] = False
        return -self.logprobs(sequence)[counted].sum()

    def _load_balancing(self) -> Tensor:
        """Load-balancing loss of a microbatch, summed over layers: E * sum over experts of (share of choices *
        probability), with probabilities summed over tokens (Fedus et al., arXiv:2101.03961, eq. 4, times the token
        count)."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for of_sequences in self.routed.values():
            logits = torch.cat([logits for logits, _ in of_sequences])
            chosen = torch.cat([chosen for _, chosen in of_sequences])
            num_experts = logits.shape[-1]
            share = torch.nn.functional.one_hot(chosen, num_experts).float().mean((0, 1))
            accurate = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total = total + num_experts * (share * accurate.softmax(-1).sum(0)).sum()
        return total

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter name. A tied head appears under both names. A parameter without influence on the
        loss, such as an encoder's last layer, has zeros."""
        return {
            name: self._as_in_files(name, torch.zeros_like(p) if p.grad is None else p.grad.clone())
            for name, p in self.parameters()
        }

    def take_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Sets gradients computed by another process with the same weights. Unnamed parameters get None."""
        for name, parameter in self.parameters():
            parameter.grad = gradients[name].to(self.device) if name in gradients else None

    def step(self) -> float:
        """Clips, takes an optimizer step and clears the gradients. Returns the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.max_grad_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.training.rate(self.num_steps) * group[LR_FACTOR]
            optimizer.step()
        for parameter, name in self._in_bfloat16.items():
            if parameter.grad is not None:
                self._steps_of[parameter] += 1
                in_files = rounded(self._as_in_files(name, parameter), self._steps_of[parameter], name)
                parameter.data.copy_(self._as_in_files(name, in_files))
        self.model.zero_grad()
        self.num_steps += 1
        return norm.item()

    def weights(self) -> dict[str, Tensor]:
        return {name: self._as_in_files(name, p.detach()) for name, p in self.parameters()}

    def _as_in_files(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a tensor to the dimension order of files and of the layout, or back."""
        is_transposed = self.files_transpose_experts and ".experts." in name and tensor.ndim == 3
        return tensor.mT if is_transposed else tensor

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Parameters under the layout's names, in which the language model is named like a whole model."""
        named = self.model.named_parameters(remove_duplicate=False)
        return [(name_in_layout(name), parameter) for name, parameter in named]


def name_in_layout(name: str) -> str:
    name = re.sub(r"^(visual|audio_tower)\.", r"model.\1.", name.replace("model.language_model.", "model.", 1))
    name = re.sub(r"^model\.(embedding_norm|norm_f|final_layernorm)\.", "model.norm.", name)
    name = name.replace("model.embeddings.", "model.embed_tokens.")
    return re.sub(
        r"(\.linear_attn|\.self_attn|\.mamba|\.mixer)(\.forget_gate)?\.(A_log|dt_bias|D)$", r"\1.decay.\3", name
    )
