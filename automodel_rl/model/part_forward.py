"""The forward of one part: token ids or hidden states in, hidden states or the head's result out.

It replaces the model's own, which would build masks and not pass the microbatch to the layers, for every model whose
layers have transformers' signature. AutoPipeline has set modules of other stages to None.
"""

import functools
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.batch.tensors import MTP_TARGETS, ROTARY_POSITIONS
from automodel_rl.compat.fsdp import gradient_sum
from automodel_rl.families.classifier import is_classifier
from automodel_rl.model.head import Head, OutputFn
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class ForwardContext:
    """Settings of a part's forward that do not depend on the microbatch.

    Attributes:
        tp: gathers hidden states split by sequence parallelism.
        cp_group: the ranks that share a microbatch; None without context parallelism.
        rotary_by_layer_type: whether rotary embeddings differ between kinds of layers.
        embedding_factor, logit_factor: the model's multipliers of embeddings and logits.
        num_deepstack: number of first layers after which image features are added (batch/media.py).
        shares_kv: whether layers pass keys and values to later layers.
        has_indexer: whether attention has an indexer, which slices the mask.
        carried_argument: the argument by which a layer gets what the previous one returns besides hidden states.
        mtp_kind: the MTP layer's kind, if rotary embeddings differ between kinds.
        detaches_mtp: whether the MTP loss sends no gradient to the model.
        has_layer_embeddings: whether every layer has its own embeddings (Gemma 4's per-layer embeddings).
        padded_ids: token ids that are embedded as the pad token.
    """

    tp: TensorParallel
    cp_group: dist.ProcessGroup | None = None
    rotary_by_layer_type: bool = False
    rotary_axes: int = 1
    softcap: float | None = None
    compiled: bool = False
    embedding_factor: float = 1.0
    logit_factor: float = 1.0
    num_deepstack: int = 0
    shares_kv: bool = False
    has_indexer: bool = False
    carried_argument: str = ""
    mtp_kind: str | None = None
    detaches_mtp: bool = True
    has_layer_embeddings: bool = False
    padded_ids: tuple[int, ...] = ()


def install_part_forward(part: Any, context: ForwardContext) -> None:
    """Replaces the forwards of a part and its head by ones over microbatches."""

    def forward(self: Any, hidden: Tensor, *, microbatch: LocalMicrobatch, output_fn: OutputFn) -> Tensor:
        return part_forward(self, hidden, microbatch, output_fn, context)

    part.forward = MethodType(forward, part)
    if part.lm_head is not None:

        def head(self: Any, hidden: Tensor, microbatch: LocalMicrobatch, output_fn: OutputFn) -> Tensor:
            sums = None
            if torch.is_grad_enabled() and self.weight.requires_grad:
                sums = functools.partial(_gradient_sum, self if isinstance(self, FSDPModule) else part, self.weight)
            return output_fn(hidden, _head(local_tensor(self.weight.detach()), sums, part.config, context), microbatch)

        # Called as `lm_head(...)`, so that FSDP's hooks gather the weight before and reduce its gradient after.
        part.lm_head.forward = MethodType(head, part.lm_head)


def _head(weight: Tensor, sums: Callable[[], Tensor] | None, config: Any, context: ForwardContext) -> Head:
    if is_classifier(config):
        copies = 1 if context.tp.group is None else context.tp.group.size()
        return Head(weight, gradient=sums, copies=copies)
    return Head(weight, context.softcap, context.tp.group, sums, context.compiled, context.logit_factor)


def _gradient_sum(unit: FSDPModule, weight: Tensor) -> Tensor:
    """`Head.gradient` for a weight of an FSDP unit."""
    return local_tensor(gradient_sum(unit, weight))


def part_forward(
    part: Any, hidden: Tensor, microbatch: LocalMicrobatch, output_fn: OutputFn, context: ForwardContext
) -> Tensor:
    """Runs this rank's tokens of a microbatch through the layers of a part.

    Features that later stages add to image tokens travel between stages as additional rows of the hidden states, as
    do embeddings of next tokens for the MTP layer.

    Args:
        hidden: token ids [1, t] on the first stage; hidden states [1, t, H] ([1, t / tp, H] under sequence
            parallelism) and additional rows on the others.

    Returns:
        Hidden states like the input's or, on the last stage, the result of `output_fn` for the model's hidden states
        followed by the MTP layer's.
    """
    body, entered = part.model, _enter(part, hidden, microbatch, context)
    hidden, features = entered.hidden, entered.features
    of_all: dict[str, Any] = {
        "attention_mask": hidden.new_empty(1, 1, 0, 0) if context.has_indexer else None,
        "position_ids": microbatch.position_ids[None],
        "use_cache": False,
        "microbatch": microbatch,
        "cp_group": context.cp_group,
    }
    if context.shares_kv:
        of_all["shared_kv_states"] = UserDict()  # FSDP hands layers copies of plain dicts
    turn = functools.cache(functools.partial(_rotary, body, hidden, microbatch, context.rotary_axes))
    layers = numbered_layers(part)
    mtp_layer = layers.pop(part.config.num_hidden_layers, None)
    for number, layer in layers.items():
        kind = part.config.layer_types[number] if context.rotary_by_layer_type else None
        output = layer(hidden, position_embeddings=turn(kind), **of_all, **entered.of_layer.get(number, {}))
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if context.carried_argument:
            (of_all[context.carried_argument],) = others
        if number < context.num_deepstack:
            hidden = microbatch.media.add_to(hidden, features.pop(0))
    following = entered.following
    if part.lm_head is None:
        further = [rows[None] for rows in features] if following is None else [following]
        return torch.cat([hidden, *further], dim=1) if further else hidden
    hidden = body.norm(hidden)
    final = context.tp.enter(hidden).squeeze(0)
    if following is not None:
        assert mtp_layer is not None
        before = (hidden.detach(), following.detach()) if context.detaches_mtp else (hidden, following)
        predicted = mtp_layer(*before, position_embeddings=turn(context.mtp_kind), **of_all)
        final = torch.cat([final, context.tp.enter(predicted).squeeze(0)])
    return part.lm_head(final, microbatch, output_fn)


@dataclass(frozen=True)
class _Entered:
    """Inputs of a part's layers.

    Attributes:
        hidden: [1, t, H] ([1, t / tp, H] under sequence parallelism).
        features: added to image tokens after each of the next layers, [i, H].
        following: embeddings of next tokens, like `hidden`, if the MTP layer is trained.
        of_layer: arguments of single layers, by number.
    """

    hidden: Tensor
    features: list[Tensor]
    following: Tensor | None = None
    of_layer: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def _enter(part: Any, hidden: Tensor, microbatch: LocalMicrobatch, context: ForwardContext) -> _Entered:
    """Embeds token ids, or splits what the previous stage sent."""
    body, has_mtp = part.model, MTP_TARGETS in microbatch.tokens
    following: Tensor | None = None
    if body.embed_tokens is None:
        if has_mtp:
            hidden, following = hidden.chunk(2, dim=1)
        carried = num_carried(part, context.num_deepstack, before=True)
        num_tokens = len(microbatch.media.places)
        hidden, *rows = hidden.split([hidden.shape[1] - carried * num_tokens, *[num_tokens] * carried], dim=1)
        return _Entered(hidden, [added.squeeze(0) for added in rows], following)
    ids, features = hidden, list[Tensor]()
    for token in context.padded_ids:
        ids = ids.masked_fill(ids == token, body.config.pad_token_id)
    hidden, following = _embedded(body, ids, microbatch, context) if has_mtp else (body.embed_tokens(ids), None)
    if context.embedding_factor != 1.0:
        hidden = hidden * context.embedding_factor
    if microbatch.media.embeddings is not None:
        hidden, features = microbatch.media.put_into(hidden)
    of_layer = _layer_embeddings(body, ids, hidden, context.tp) if context.has_layer_embeddings else {}
    return _Entered(hidden, features, following, of_layer)


def _rotary(body: Any, hidden: Tensor, microbatch: LocalMicrobatch, axes: int, kind: str | None) -> Any:
    """Returns the rotary embeddings of a microbatch for a kind of layers; None for a model without positions."""
    if body.rotary_emb is None:
        return None
    positions = microbatch.position_ids[None]
    if axes > 1:
        found = microbatch.tokens.get(ROTARY_POSITIONS)  # text has the same position on all axes
        positions = positions.expand(axes, 1, -1) if found is None else found.T[:, None]
    return body.rotary_emb(hidden, positions, *([] if kind is None else [kind]))


def _embedded(body: Any, ids: Tensor, microbatch: LocalMicrobatch, context: ForwardContext) -> tuple[Tensor, Tensor]:
    """Embeds this rank's tokens and their next tokens in one call, each [1, t, H] ([1, t / tp, H] under sequence
    parallelism)."""
    parts = context.tp.group.size() if context.tp.group is not None and context.tp.sequence_parallel else 1
    following = microbatch.targets.clamp_min(0)
    both = torch.stack([ids[0].view(parts, -1), following.view(parts, -1)], dim=1).view(1, -1)
    hidden, following = body.embed_tokens(both).chunk(2, dim=1)
    return hidden, following


def _layer_embeddings(body: Any, ids: Tensor, hidden: Tensor, tp: TensorParallel) -> dict[int, dict[str, Tensor]]:
    """Returns each layer's argument with its own embeddings, by layer number, for token ids [1, t] embedded as
    `hidden`."""
    own = ids.chunk(tp.group.size(), dim=1)[tp.group.rank()] if tp.group is not None and tp.sequence_parallel else ids
    found = body.project_per_layer_inputs(hidden, body.get_per_layer_inputs(own, None))  # [1, t, layers, d]
    return {number: {"per_layer_input": of_layer} for number, of_layer in enumerate(found.unbind(2))}


def num_carried(part: Any, num_deepstack: int, *, before: bool) -> int:
    """Returns how many features per image token enter (`before`) or leave a part with the hidden states."""
    numbers = numbered_layers(part)
    return max(0, num_deepstack - (min(numbers) if before else max(numbers) + 1))


def layers_of(part: Any) -> list[Any]:
    """Returns the decoder layers of a part."""
    return list(numbered_layers(part).values())


def numbered_layers(part: Any) -> dict[int, Any]:
    """Returns the decoder layers of a part by their number in the model."""
    layers = part.model.layers
    named = layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers)
    return {int(number): layer for number, layer in named}
