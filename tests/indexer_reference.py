"""The indexers' own loss by plain transformers: one process, one sequence at a time, and weights of eager attention."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_rl.batch import TokenSequence

Inputs = tuple[Tensor, Tensor, tuple[Tensor, Tensor]]


class IndexedModel:
    """A model, and what its indexers and its attention made of the last sequence.

    Args:
        folder: the checkpoint's folder.
    """

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self.pairs = "glm" in self.model.config.model_type
        self.seen: list[tuple[Any, Inputs, Tensor, Tensor]] = []  # indexer, its inputs, its choice, weights
        for layer in self.model.model.layers:
            attention = layer.self_attn
            if attention.indexer is not None:
                attention.indexer.register_forward_hook(self._note_choice)
            attention.register_forward_hook(self._note_weights)

    def _note_choice(self, indexer: Any, args: tuple[Any, ...], choice: Tensor) -> None:
        self.latest = (indexer, args[:3], choice[0].long())

    def _note_weights(self, _: Any, __: Any, output: tuple[Tensor, Tensor]) -> None:
        self.seen.append((*self.latest, output[1][0].detach()))

    def cross_entropies(self, sequence: TokenSequence) -> Tensor:
        """The cross-entropy of each query's scores to the mean of heads' weights, summed over queries and layers."""
        self.seen = []
        self.model(sequence.input_ids[None])
        total = torch.zeros((), dtype=torch.float64)
        for indexer, inputs, choice, weights in self.seen:
            scores, place = self._scores(indexer, *inputs), torch.arange(len(sequence))
            is_seen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, choice, True)
            is_seen &= place[:, None] >= place[None]
            for query, mean in enumerate(weights.mean(0)):
                keys = is_seen[query].nonzero()[:, 0]
                total = total - (mean[keys] * scores[query, keys].log_softmax(0)).sum()
        return total

    def _scores(self, indexer: Any, hidden: Tensor, latent: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """An indexer's scores of all keys, [n, n], with gradients for the indexer alone."""
        queries = indexer.wq_b(latent.detach()[0]).view(-1, indexer.n_heads, indexer.head_dim)
        keys = indexer.k_norm(indexer.wk(hidden.detach()[0]))
        queries, keys = self._turned(queries, indexer, turns), self._turned(keys[:, None], indexer, turns)[:, 0]
        products = torch.einsum("qhd,kd->hqk", queries, keys).clamp_min(0) * indexer.softmax_scale
        weights = indexer.weights_proj(hidden.detach()[0]) / indexer.n_heads**0.5
        return torch.einsum("qh,hqk->qk", weights, products)

    def _turned(self, x: Tensor, indexer: Any, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Rotary embeddings of the first dims, as products of complex numbers."""
        dims = indexer.qk_rope_head_dim
        turn = torch.complex(*(t[0, :, None, : dims // 2].double() for t in turns))
        pairs = x[..., :dims].unflatten(-1, (-1, 2) if self.pairs else (2, -1))
        one, other = pairs.unbind(-1 if self.pairs else -2)
        turned = torch.complex(one, other) * turn
        found = torch.stack([turned.real, turned.imag], dim=-1 if self.pairs else -2).flatten(-2)
        return torch.cat([found, x[..., dims:]], dim=-1)


def gradients_of_one_process(
    folder: Path, sequences: list[TokenSequence], weight: float
) -> tuple[float, dict[str, Tensor]]:
    """The mean cross-entropy of tokens and layers, and the gradients of sft's loss and, times a weight, of that of
    indexers."""
    indexed = IndexedModel(folder)
    model, num_tokens = indexed.model, sum(map(len, sequences))
    num_trained = sum(int(sequence.loss_mask[1:].sum()) for sequence in sequences)
    total = 0.0
    for sequence in sequences:
        entropies = indexed.cross_entropies(sequence)
        total += entropies.item()
        (weight * entropies / num_tokens).backward()
        logits = model(sequence.input_ids[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, sequence.input_ids[1:, None])[:, 0]
        (-logprobs[sequence.loss_mask[1:]].sum() / num_trained).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return total / (num_tokens * len(model.model.layers)), gradients
