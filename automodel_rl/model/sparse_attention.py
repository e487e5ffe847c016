"""Sparse attention with an indexer (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): of the keys that a query may see, it
sees the most relevant, which a few light heads choose.

The choice is not differentiable, and indexers are frozen. A sequence that is no longer than the number of chosen keys
has plain causal attention.

Shape letters: t tokens of a rank, q queries and k keys of one sequence, I heads of the indexer, D their dims.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_rl.families.family import Family
from automodel_rl.model.head import accurate_matmul
from automodel_rl.parallel.collectives import AllGatherCP

QUERIES_AT_ONCE = 1024
"""Queries of one call of masked attention, whose mask and scores of all keys are there at the same time."""

PRODUCTS_AT_ONCE = 2**28
"""Most products of an indexer's queries and keys, in fp32, that are there at the same time."""


@dataclass(eq=False)  # not frozen, as `AttentionCall`
class KeyIndex:
    """What an indexer makes of tokens, from which it follows which keys each query sees.

    Attributes:
        queries: [t, I, D].
        keys: one for all heads, [t, D].
        weights: of the heads' scores, fp32 [t, I].
        most: number of keys that a query sees at most.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor
    most: int

    def gathered(self, group: dist.ProcessGroup) -> "KeyIndex":
        """The same with the keys of all ranks of a context parallel group."""
        return replace(self, keys=AllGatherCP.apply(self.keys, group, "sum"))

    def of(self, queries: Tensor, keys: Tensor) -> "KeyIndex":
        """The part for some queries and some keys, by their places, int64."""
        return replace(
            self,
            queries=self.queries.index_select(0, queries),
            keys=self.keys.index_select(0, keys),
            weights=self.weights.index_select(0, queries),
        )

    @torch.no_grad()
    def seen(self, queries: slice, keys: slice, causal: Tensor) -> Tensor:
        """The keys of a sequence that its queries see: True for those, bool [q, k].

        Args:
            queries, keys: slices of those that this index has.
            causal: True for keys that are not after a query, bool [q, k].
        """
        if causal.shape[1] <= self.most:
            return causal
        rows = max(1, PRODUCTS_AT_ONCE // (self.queries.shape[1] * causal.shape[1]))
        own = (self.queries[queries].split(rows), self.weights[queries].split(rows), causal.split(rows))
        return torch.cat([_chosen(q, w, c, self.keys[keys], self.most) for q, w, c in zip(*own, strict=True)])


def _chosen(queries: Tensor, weights: Tensor, causal: Tensor, keys: Tensor, most: int) -> Tensor:
    """True for the keys with the largest scores, bool [q, k].

    Args:
        queries: [q, I, D].
        weights: [q, I].
        causal: [q, k].
        keys: [k, D].
        most: number of keys that a query sees at most.
    """
    products = accurate_matmul(queries.flatten(0, 1), keys.T).view(*queries.shape[:2], -1)  # [q, I, k]
    scores = (weights[:, None] @ products.float().relu_()).squeeze(1)
    chosen = scores.masked_fill_(~causal, -torch.inf).topk(most, dim=-1).indices
    return torch.zeros_like(causal).scatter_(1, chosen, True) & causal


def install_indexers(layers: Iterable[nn.Module], family: Family) -> None:
    """Makes the indexers of layers give a `KeyIndex`, which attention hands on to its backend, and freezes them.

    Args:
        layers: the layers.
        family: their model's family.
    """
    for indexer in _indexers(layers, family):
        indexer.forward = MethodType(_FORWARDS[family.index_rotary], indexer)


def freeze_indexers(layers: Iterable[nn.Module], family: Family) -> None:
    """Freezes the indexers of layers, to which no gradient flows. The arguments are those of `install_indexers`."""
    for indexer in _indexers(layers, family):
        indexer.requires_grad_(False)


def _indexers(layers: Iterable[nn.Module], family: Family) -> list[nn.Module]:
    if not family.index_rotary:
        return []
    return [module for layer in layers for name, module in layer.named_modules() if name.endswith("indexer")]


@torch.no_grad()
def _index(indexer: Any, hidden: Tensor, latent: Tensor, turns: tuple[Tensor, Tensor], in_pairs: bool) -> KeyIndex:
    """The index of tokens.

    Args:
        indexer: transformers' module.
        hidden: hidden states, [1, t, H].
        latent: latent queries of the attention, [1, t, rank].
        turns: cosines and sines of rotary embeddings, [1, t, R].
        in_pairs: whether neighbouring dims turn together, and not those of two halves.
    """
    cos, sin = (turn[0, :, None, : turn.shape[-1] // 2] for turn in turns)
    queries = indexer.wq_b(latent)[0].unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden))[0, :, None]
    queries, keys = (_turned(x, cos, sin, indexer.qk_rope_head_dim, in_pairs) for x in (queries, keys))
    weights = indexer.weights_proj(hidden)[0].float() * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    return KeyIndex(queries, keys.squeeze(1), weights, indexer.index_topk)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, rotary_dims: int, in_pairs: bool) -> Tensor:
    """Queries or keys [t, heads, D] whose first dims are turned."""
    turned, rest = x[..., :rotary_dims], x[..., rotary_dims:]
    one, other = (turned[..., ::2], turned[..., 1::2]) if in_pairs else turned.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], dim=-1)


def _of_halves(indexer: Any, hidden: Tensor, latent: Tensor, turns: Any, *_: Any, **__: Any) -> KeyIndex:
    return _index(indexer, hidden, latent, turns, in_pairs=False)


def _of_pairs(indexer: Any, hidden: Tensor, latent: Tensor, turns: Any, *_: Any, **__: Any) -> KeyIndex:
    return _index(indexer, hidden, latent, turns, in_pairs=True)


_FORWARDS = {"halves": _of_halves, "pairs": _of_pairs}
