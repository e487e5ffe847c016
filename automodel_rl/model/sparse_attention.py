"""Sparse attention with an indexer (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): a few light heads select the most
relevant keys for each query, and attention sees only those.

The selection is not differentiable. Indexers are frozen, or trained by their own loss (model/indexer_loss.py), whose
gradient reaches only them. Sequences no longer than the number of selected keys get plain causal attention.

Shape letters: t tokens of a rank, q queries and k keys of one sequence, h heads of attention, I heads of the indexer,
D their dims.
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
"""Queries per call of masked attention; bounds the size of its masks and scores."""

PRODUCTS_AT_ONCE = 2**28
"""Maximum number of an indexer's fp32 query-key products in memory at once."""

PRODUCTS_OF_LOSS = 2**26
"""The same for the indexers' loss, which needs several tensors of this size, of attention's products, too."""


class KeyIndex:
    """An indexer's queries, keys and head weights, which determine the keys that each query sees.

    Not a dataclass: FSDP would find its tensors when a layer passes it to the next.

    Attributes:
        queries: [t, I, D].
        keys: shared by all heads, [t, D].
        weights: factors of the heads' scores, fp32 [t, I].
        most: maximum number of keys per query.
        loss: the indexer's loss; None if it is not trained.
    """

    def __init__(self, queries: Tensor, keys: Tensor, weights: Tensor, most: int, loss: IndexerLoss | None = None):
        self.queries, self.keys, self.weights, self.most, self.loss = queries, keys, weights, most, loss

    def gathered(self, group: dist.ProcessGroup) -> "KeyIndex":
        """Returns the index with the keys of all context parallel ranks."""
        keys = AllGatherCP.apply(self.keys, group, "sum")
        return KeyIndex(self.queries, keys, self.weights, self.most, self.loss)

    def of(self, queries: Tensor, keys: Tensor) -> "KeyIndex":
        """Returns the index of some queries and keys, selected by int64 indices."""
        own, weights = self.queries.index_select(0, queries), self.weights.index_select(0, queries)
        return KeyIndex(own, self.keys.index_select(0, keys), weights, self.most, self.loss)

    @torch.no_grad()
    @nothing_kept()
    def seen(self, queries: slice, keys: slice, causal: Tensor) -> Tensor:
        """Returns True for the keys that queries of a sequence see, bool [q, k]."""
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
        """Returns this rank's summands of the indexer loss's gradients by `queries`, `keys` and `weights`, in their
        dtypes.

        Args:
            is_real: False for pads, bool [t].
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
        queries, keys: their slices in the call.
        query, key: [q, h, D] and [k, h, D].
    """

    queries: slice
    keys: slice
    query: Tensor
    key: Tensor
    scale: float
    causal: Tensor


def _blocks(attention: Iterable[SequenceAttention], num_heads: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yields blocks of queries small enough for `PRODUCTS_OF_LOSS`: slices of queries and keys, causal mask [q, k],
    scaled attention products [h, q, k]."""
    for one in attention:
        rows = max(1, PRODUCTS_OF_LOSS // (max(num_heads, one.key.shape[1]) * len(one.key)))
        key = one.key.permute(1, 2, 0)
        for start in range(0, len(one.query), rows):
            some = slice(start, min(start + rows, len(one.query)))
            places = slice(one.queries.start + some.start, one.queries.start + some.stop)
            yield places, one.keys, one.causal[some], one.query[some].transpose(0, 1) @ key * one.scale


def _rectified(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns ReLU of the products of an indexer's queries [q, I, D] and keys [k, D], fp32 [q, I, k]."""
    return accurate_matmul(queries.flatten(0, 1), keys.T).view(*queries.shape[:2], -1).float().relu_()


def _scores(rectified: Tensor, weights: Tensor) -> Tensor:
    """Returns an indexer's scores, fp32 [q, k], weighted by heads [q, I]."""
    return (weights[:, None] @ rectified).squeeze(1)


def _chosen(scores: Tensor, causal: Tensor, most: int) -> Tensor:
    """Returns True for each query's `most` highest-scored causal keys, bool [q, k]."""
    chosen = scores.masked_fill(~causal, -torch.inf).topk(most, dim=-1).indices
    return torch.zeros_like(causal).scatter_(1, chosen, True) & causal


def install_indexers(layers: Iterable[nn.Module], family: Family, loss: IndexerLoss | None) -> None:
    """Makes layers' indexers return a `KeyIndex`, which attention passes to its backend. `loss` is None for frozen
    indexers."""
    for indexer in _indexers(layers, family):
        indexer.loss = loss
        indexer.forward = MethodType(_FORWARDS[family.index_rotary], indexer)


def freeze_indexers(layers: Iterable[nn.Module], family: Family) -> None:
    """Freezes the indexers of layers. The model's loss sends them no gradient."""
    for indexer in _indexers(layers, family):
        indexer.requires_grad_(False)


def _indexers(layers: Iterable[nn.Module], family: Family) -> list[Any]:
    if not family.index_rotary:
        return []
    return [module for layer in layers for name, module in layer.named_modules() if name.endswith("indexer")]


def _index(indexer: Any, hidden: Tensor, latent: Tensor, turns: tuple[Tensor, Tensor], in_pairs: bool) -> KeyIndex:
    """Builds the index of tokens.

    Args:
        hidden: hidden states, [1, t, H].
        latent: latent queries of attention, [1, t, rank].
        turns: cosines and sines of rotary embeddings, [1, t, R].
        in_pairs: rotates neighbouring dims together rather than those of the two halves.
    """
    loss = indexer.loss if indexer.training and torch.is_grad_enabled() else None
    with torch.set_grad_enabled(loss is not None):
        return KeyIndex(*_made(indexer, hidden.detach(), latent.detach(), turns, in_pairs), indexer.index_topk, loss)


def _made(
    indexer: Any, hidden: Tensor, latent: Tensor, turns: tuple[Tensor, Tensor], in_pairs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = (turn[0, :, None, : turn.shape[-1] // 2] for turn in turns)
    queries = indexer.wq_b(latent)[0].unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden))[0, :, None]
    queries, keys = (_turned(x, cos, sin, indexer.qk_rope_head_dim, in_pairs) for x in (queries, keys))
    weights = indexer.weights_proj(hidden)[0].float() * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    return queries, keys.squeeze(1), weights


def _turned(x: Tensor, cos: Tensor, sin: Tensor, rotary_dims: int, in_pairs: bool) -> Tensor:
    """Applies rotary embeddings to the first dims of queries or keys [t, heads, D]."""
    turned, rest = x[..., :rotary_dims], x[..., rotary_dims:]
    one, other = (turned[..., ::2], turned[..., 1::2]) if in_pairs else turned.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], dim=-1)


def _of_halves(indexer: Any, hidden: Tensor, latent: Tensor, turns: Any, *_: Any, **__: Any) -> KeyIndex:
    return _index(indexer, hidden, latent, turns, in_pairs=False)


def _of_pairs(indexer: Any, hidden: Tensor, latent: Tensor, turns: Any, *_: Any, **__: Any) -> KeyIndex:
    return _index(indexer, hidden, latent, turns, in_pairs=True)


_FORWARDS = {"halves": _of_halves, "pairs": _of_pairs}
