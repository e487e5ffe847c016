"""Multi-token prediction (MTP, DeepSeek-V3, arXiv:2412.19437, section 2.2): an additional layer predicts the token
after the next from final hidden states and the next token's embedding. Generators draft with it (speculative
decoding).

As in DeepSeek's files, its number follows the model's last layer, and it has modules of its own besides a decoder
layer's. It runs on the last stage, for microbatches with `MTP_TARGETS`.

Shape letters: T tokens of a microbatch, t tokens of a rank, H hidden size.
"""

import copy
import dataclasses
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.batch import LocalMicrobatch, Microbatch
from automodel_rl.batch.microbatch import IGNORED_TARGET
from automodel_rl.batch.tensors import MTP_TARGETS
from automodel_rl.losses import LossFn, LossOutput, Readout, TokenOutputs
from automodel_rl.model.head import Head
from automodel_rl.model.logprobs import target_readout


def add_mtp_layer(model: Any, kinds: tuple[str, str]) -> None:
    """Adds the MTP layer to a causal language model without storage. `kinds` is `Family.mtp_kinds`."""
    layers, number = model.model.layers, model.config.num_hidden_layers
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = number + 1
    for key, kind in zip(("layer_types", "mlp_layer_types"), kinds, strict=True):
        if of_layers := config.to_dict().get(key):
            setattr(config, key, [*of_layers, kind])
    layer = type(layers[-1])(config, number)
    width, dtype = config.hidden_size, model.model.norm.weight.dtype
    layer.enorm, layer.hnorm = copy.deepcopy(model.model.norm), copy.deepcopy(model.model.norm)
    layer.eh_proj = nn.Linear(2 * width, width, bias=False)
    layer.shared_head = nn.Module()
    layer.shared_head.norm = copy.deepcopy(model.model.norm)
    layer.forward = MethodType(_forward, layer)
    layers.append(layer.to(dtype))


def _forward(layer: Any, hidden: Tensor, embedded: Tensor, **arguments: Any) -> Tensor:
    """Maps final hidden states and embeddings of the next tokens to hidden states for the token after, each
    [1, t, H]."""
    mixed = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1))
    output = type(layer).forward(layer, mixed, **arguments)
    return layer.shared_head.norm(output[0] if isinstance(output, tuple) else output)


def mtp_targets(microbatch: Microbatch) -> Tensor:
    """Returns the token after the next of every token, int64 [T]; `IGNORED_TARGET` at the last two of a sequence."""
    return _moved_up(microbatch.targets, microbatch, IGNORED_TARGET)


def with_mtp(loss_fn: LossFn, weight: float) -> LossFn:
    """Adds the MTP loss to a loss: `weight` times the mean negative log-probability of trained tokens."""

    def loss(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        output = loss_fn(outputs, microbatch)
        assert outputs.mtp is not None
        trained = _moved_up(microbatch.loss_mask, microbatch, False)
        total = -torch.where(trained, outputs.mtp, 0.0).sum()
        of_mtp = (total.detach(), trained.sum().to(total.dtype))
        metrics = {**output.metrics, "train/mtp_loss": of_mtp}
        return dataclasses.replace(output, auxiliary={"tokens": weight * total}, metrics=metrics)

    return loss


def mtp_readout(hidden: Tensor, head: Head, microbatch: LocalMicrobatch, readout: Readout, detached: bool) -> Tensor:
    """Returns log-probabilities of the tokens after the next, [t, 1], from the MTP layer's hidden states [t, H]. If
    `detached`, the head gets no gradient."""
    targets = microbatch.tokens[MTP_TARGETS]
    head = dataclasses.replace(head, weight=head.weight.detach(), gradient=None) if detached else head
    tokens = {MTP_TARGETS: targets}  # drops the known gradients, which belong to the next tokens
    return target_readout(
        hidden, head, dataclasses.replace(microbatch, targets=targets, tokens=tokens), Readout(readout.temperature)
    )


def _moved_up(values: Tensor, microbatch: Microbatch, last: int) -> Tensor:
    """Shifts values [T] forward by one token; the last token of a sequence gets `last`."""
    moved = values.roll(-1)
    moved[microbatch.cu_seqlens[1:].long() - 1] = last
    return moved
