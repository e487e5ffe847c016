"""The forward of one part: token ids or hidden states in, hidden states or the head's result out.

It takes the place of the model's own forward, which would build masks and drop the packing before the layers. It serves
every model whose layers have transformers' signature. AutoPipeline has set the modules of other stages to None.
"""

from types import MethodType
from typing import Any

from torch import Tensor, nn

from automodel_rl.batch import PackedBatch
from automodel_rl.parallel.adapters import OutputFn


def install_part_forward(model: Any) -> None:
    """Gives a causal language model, or each part that is split off it later, the packed forward."""
    model.forward = MethodType(part_forward, model)
    model.lm_head.forward = MethodType(head_forward, model.lm_head)


def part_forward(part: Any, hidden: Tensor, *, batch: PackedBatch, output_fn: OutputFn) -> Tensor:
    """One packed row through the layers of a part.

    Args:
        hidden: token ids [1, T] on the first stage, hidden states [1, T, H] on the others.
        batch: the row.
        output_fn: makes the last stage's result of final hidden states and head weight.

    Returns:
        Hidden states [1, T, H], or the result of `output_fn` on the last stage.
    """
    body = part.model
    if body.embed_tokens is not None:
        hidden = body.embed_tokens(hidden)
    positions = batch.position_ids[None]
    rotary = body.rotary_emb(hidden, positions)
    layers = body.layers.values() if isinstance(body.layers, nn.ModuleDict) else body.layers
    for layer in layers:
        hidden = layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=rotary,
            use_cache=False,
            batch=batch,
        )
    if part.lm_head is None:
        return hidden
    return part.lm_head(body.norm(hidden).squeeze(0), batch, output_fn)


def head_forward(head: nn.Linear, hidden: Tensor, batch: PackedBatch, output_fn: OutputFn) -> Tensor:
    """Called as `head(...)`, so that FSDP's hooks gather the weight before and reduce its gradient after."""
    return output_fn(hidden, head.weight, batch)
