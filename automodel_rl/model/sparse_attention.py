"""Sparse attention with an indexer (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): of the keys that a query may see, it
sees the most relevant, which a few light heads choose.

The choice is not differentiable. Indexers are frozen, or trained by a loss of their own (model/indexer_loss.py), whose
gradient goes no further than to them. A sequence that is no longer than the number of chosen keys has plain causal
attention.

Shape letters: t tokens of a rank, q queries and k keys of one sequence, h heads of attention, I heads of the indexer, D
their dims.
"""

from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_rl.families.family import Family
from automodel_rl.model.activation_checkpointing import nothing_kept
from automodel_rl.model.head import accurate_matmul
from automodel_rl.model.indexer_loss import IndexerLoss
from automodel_rl.parallel.collectives import AllGatherCP

QUERIES_AT_ONCE = 1024
"""Queries of one call of masked attention, whose mask and scores of all keys are there at the same time."""

PRODUCTS_AT_ONCE = 2**28
"""Most products of an indexer's queries and keys, in fp32, that are there at the same time."""

PRODUCTS_OF_LOSS = 2**26
"""The same for the loss of indexers, which needs several tensors of this size, of attention's products, too."""


class KeyIndex:
    """What an indexer makes of tokens, from which it follows which keys each query sees.

    It is no dataclass, in which FSDP would find tensors that a layer hands on to the next.

    Attributes:
        queries: [t, I, D].
        keys: one for all heads, [t, D].
        weights: of the heads' scores, fp32 [t, I].
        most: number of keys that a query sees at most.
        loss: what trains the indexer; None if it is not trained.
    """

    def __init__(self, queries: Tensor, keys: Tensor, weights: Tensor, most: int, loss: IndexerLoss | None = None):
        self.queries, self.keys, self.weights, self.most, self.loss = queries, keys, weights, most, loss

    def gathered(self, group: dist.ProcessGroup) -> "KeyIndex":
        """The same with the keys of all ranks of a context parallel group."""
        keys = AllGatherCP.apply(self.keys, group, "sum")
        return KeyIndex(self.queries, keys, self.weights, self.most, self.loss)

    def of(self, queries: Tensor, keys: Tensor) -> "KeyIndex":
        """The part for some queries and some keys, by their places, int64."""
        own, weights = self.queries.index_select(0, queries), self.weights.index_select(0, queries)
        return KeyIndex(own, self.keys.index_select(0, keys), weights, self.most, self.loss)

    @torch.no_grad()
    @nothing_kept()
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
        return torch.cat(
            [_chosen(_scores(_rectified(q, self.keys[keys]), w), c, self.most) for q, w, c in zip(*own, strict=True)]
        )

    @torch.no_grad()
    @nothing_kept()
    def gradients(self, attention: Iterable["SequenceAttention"], is_real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's summands of the gradients of the indexer's loss by queries, keys and weights, of their dtypes.

        Args:
            attention: that of every sequence.
            is_real: False for queries that are pads, bool [t].
        """
        assert self.loss is not None
        of_queries, of_weights = torch.zeros_like(self.queries), torch.zeros_like(self.weights)
        of_keys = torch.zeros_like(self.keys, dtype=self.weights.dtype)
        for some, keys, seen, products in _blocks(attention, self.queries.shape[1]):
            q, k, w = self.queries[some], self.keys[keys], self.weights[some]
            of_heads = _rectified(q, k)
            scores = _scores(of_heads, w)
            if seen.shape[1] > self.most:
                seen = _chosen(scores, seen, self.most)
            by_scores = self.loss.by_scores(scores, products, seen, is_real[some])[:, None]  # [q, 1, k]
            of_weights[some] = (of_heads * by_scores).sum(-1)
            by_products = (w[..., None] * by_scores * (of_heads > 0)).to(q.dtype)  # [q, I, k]
            of_queries[some] = by_products @ k
            of_keys[keys] += by_products.flatten(0, 1).T @ q.flatten(0, 1)
        return of_queries, of_keys.to(self.keys.dtype), of_weights


class SequenceAttention(NamedTuple):
    """The attention of one sequence of a call.

    Attributes:
        queries, keys: places of its queries and keys in the call.
        query, key: [q, h, D] and [k, h, D].
        scale: the factor of their products.
        causal: True for keys that are not after a query, bool [q, k].
    """

    queries: slice
    keys: slice
    query: Tensor
    key: Tensor
    scale: float
    causal: Tensor


def _blocks(attention: Iterable[SequenceAttention], num_heads: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Places of queries, so many that their products for all heads are not too many, and of their keys, with the causal
    mask [q, k] and scaled products of attention, [h, q, k].

    Args:
        attention: that of every sequence.
        num_heads: number of heads of the indexer.
    """
    for one in attention:
        rows = max(1, PRODUCTS_OF_LOSS // (max(num_heads, one.key.shape[1]) * len(one.key)))
        key = one.key.permute(1, 2, 0)
        for start in range(0, len(one.query), rows):
            some = slice(start, min(start + rows, len(one.query)))
            places = slice(one.queries.start + some.start, one.queries.start + some.stop)
            yield places, one.keys, one.causal[some], one.query[some].transpose(0, 1) @ key * one.scale


def _rectified(queries: Tensor, keys: Tensor) -> Tensor:
    """Products of an indexer's queries [q, I, D] and keys [k, D] where they are positive, else 0, fp32 [q, I, k]."""
    return accurate_matmul(queries.flatten(0, 1), keys.T).view(*queries.shape[:2], -1).float().relu_()


def _scores(rectified: Tensor, weights: Tensor) -> Tensor:
    """An indexer's scores of keys, fp32 [q, k], by the weights of its heads [q, I]."""
    return (weights[:, None] @ rectified).squeeze(1)


def _chosen(scores: Tensor, causal: Tensor, most: int) -> Tensor:
    """True for the keys with the largest scores, bool [q, k].

    Args:
        scores: [q, k].
        causal: [q, k].
        most: number of keys that a query sees at most.
    """
    chosen = scores.masked_fill(~causal, -torch.inf).topk(most, dim=-1).indices
    return torch.zeros_like(causal).scatter_(1, chosen, True) & causal


def install_indexers(layers: Iterable[nn.Module], family: Family, loss: IndexerLoss | None) -> None:
    """Makes the indexers of layers give a `KeyIndex`, which attention hands on to its backend.

    Args:
        layers: the layers.
        family: their model's family.
        loss: what trains them; None if they are frozen.
    """
    for indexer in _indexers(layers, family):
        indexer.loss = loss
        indexer.forward = MethodType(_FORWARDS[family.index_rotary], indexer)


def freeze_indexers(layers: Iterable[nn.Module], family: Family) -> None:
    """Freezes the indexers of layers, to which no gradient of the model's loss flows.

    Args:
        layers: the layers.
        family: their model's family.
    """
    for indexer in _indexers(layers, family):
        indexer.requires_grad_(False)


def _indexers(layers: Iterable[nn.Module], family: Family) -> list[Any]:
    if not family.index_rotary:
        return []
    return [module for layer in layers for name, module in layer.named_modules() if name.endswith("indexer")]


def _index(indexer: Any, hidden: Tensor, latent: Tensor, turns: tuple[Tensor, Tensor], in_pairs: bool) -> KeyIndex:
    """The index of tokens.

    Args:
        indexer: transformers' module.
        hidden: hidden states, [1, t, H].
        latent: latent queries of the attention, [1, t, rank].
        turns: cosines and sines of rotary embeddings, [1, t, R].
        in_pairs: whether neighbouring dims turn together, and not those of two halves.
    """
    loss = indexer.loss if indexer.training and torch.is_grad_enabled() else None
    with torch.set_grad_enabled(loss is not None):
        return KeyIndex(*_made(indexer, hidden.detach(), latent.detach(), turns, in_pairs), indexer.index_topk, loss)


def _made(
    indexer: Any, hidden: Tensor, latent: Tensor, turns: tuple[Tensor, Tensor], in_pairs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and weights of a `KeyIndex`. The arguments are those of `_index`."""
    cos, sin = (turn[0, :, None, : turn.shape[-1] // 2] for turn in turns)
    queries = indexer.wq_b(latent)[0].unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden))[0, :, None]
    queries, keys = (_turned(x, cos, sin, indexer.qk_rope_head_dim, in_pairs) for x in (queries, keys))
    weights = indexer.weights_proj(hidden)[0].float() * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    return queries, keys.squeeze(1), weights


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
