"""Elementwise work on the head's products: logits, softmax sums, gradients. Compiled on CUDA, to read the products
once.

Shape letters: C tokens of a chunk, V vocabulary (this rank's shard under tensor parallelism), K vocabulary indices
that are read per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.block_sizes import block_sizes
from automodel_rl.compat.compilation import compile_for_rows


@dataclass(frozen=True)
class Softmax:
    """softmax(cap(products) / temperature), with products capped as softcap * tanh(products / softcap) if `softcap`
    is set."""

    softcap: float | None
    temperature: float
    compiled: bool = False

    def score(self, products_CV: Tensor, places_CK: Tensor, with_mean: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns logits at vocabulary indices, [C, K], 0 outside this shard; log-sum-exp of all logits, [C]; and
        with `with_mean` the mean logit under the softmax, [C]."""
        if self.compiled:
            return _compiled_score(products_CV, places_CK, self.softcap, self.temperature, with_mean)
        pieces = [
            _score(products_CV[rows], places_CK[rows], self.softcap, self.temperature, with_mean)
            for rows in _rows(products_CV)
        ]
        picked, logsumexp, mean = zip(*pieces, strict=True)
        return torch.cat(picked), torch.cat(logsumexp), torch.cat(mean) if with_mean else None

    def gradient(self, products_CV: Tensor, places_CK: Tensor, given: "BackwardInputs", out_CV: Tensor) -> None:
        """Writes the gradient of the products to `out_CV`.

        The derivative of log p(index) by the logits is one-hot(index) - p. That of the entropy is -p * (log p +
        entropy).
        """
        columns = [places_CK, given.logsumexp, given.d_logprob, given.entropy, given.d_entropy]
        if self.compiled:
            _compiled_gradient(products_CV, columns, self.softcap, self.temperature, out_CV)
            return
        for rows in _rows(products_CV):
            pieces = [None if column is None else column[rows] for column in columns]
            _gradient(products_CV[rows], pieces, self.softcap, self.temperature, out_CV[rows])


@dataclass(frozen=True)
class BackwardInputs:
    """Per-token values of a chunk that the gradient needs.

    Attributes:
        logsumexp: over the whole vocabulary, [C].
        d_logprob: gradient of the log-probabilities, [C, K]; 0 where there is none.
        entropy, d_entropy: [C]; None if entropies have no gradient.
    """

    logsumexp: Tensor
    d_logprob: Tensor
    entropy: Tensor | None = None
    d_entropy: Tensor | None = None


def _score(
    products_CV: Tensor, places_CK: Tensor, softcap: float | None, temperature: float, with_mean: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits_CV = _logits(products_CV, softcap, temperature)
    inside_CK = (places_CK >= 0) & (places_CK < logits_CV.shape[1])
    picked_CK = logits_CV.gather(1, places_CK.where(inside_CK, 0)).where(inside_CK, 0.0)
    largest_C = logits_CV.amax(1, keepdim=True)
    weights_CV = (logits_CV - largest_C).exp()
    total_C = weights_CV.sum(1)
    mean_C = (weights_CV * logits_CV).sum(1) / total_C if with_mean else None
    return picked_CK, total_C.log() + largest_C[:, 0], mean_C


def _gradient(
    products_CV: Tensor, columns: list[Tensor | None], softcap: float | None, temperature: float, out_CV: Tensor
) -> None:
    places_CK, logsumexp_C, d_logprob_CK, entropy_C, d_entropy_C = columns
    assert places_CK is not None
    assert logsumexp_C is not None
    assert d_logprob_CK is not None
    logits_CV = _logits(products_CV, softcap, temperature)
    logprobs_CV = logits_CV - logsumexp_C[:, None]
    p_CV = logprobs_CV.exp()
    if places_CK.shape[1] == 1:  # without a scatter, so that a single kernel suffices
        is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == places_CK
        d_logits_CV = (is_target_CV.to(p_CV.dtype) - p_CV) * d_logprob_CK
    else:
        inside_CK = (places_CK >= 0) & (places_CK < logits_CV.shape[1])
        added_CK = d_logprob_CK.where(inside_CK, 0.0)
        d_logits_CV = -p_CV * d_logprob_CK.sum(1, keepdim=True)
        d_logits_CV = d_logits_CV.scatter_add(1, places_CK.where(inside_CK, 0), added_CK)
    if entropy_C is not None:
        assert d_entropy_C is not None
        d_logits_CV = d_logits_CV - p_CV * (logprobs_CV + entropy_C[:, None]) * d_entropy_C[:, None]
    if softcap is not None:
        d_logits_CV = d_logits_CV * (1 - (logits_CV * (temperature / softcap)).square())
    if temperature != 1.0:
        d_logits_CV = d_logits_CV / temperature
    out_CV.copy_(d_logits_CV)


_compiled_score, _compiled_gradient = compile_for_rows(_score), compile_for_rows(_gradient)


def _rows(products_CV: Tensor) -> list[slice]:
    """Returns row slices that limit intermediate tensors where nothing fuses them."""
    num_rows, width = products_CV.shape
    most = block_sizes.elementwise_bytes if products_CV.is_cuda else block_sizes.elementwise_bytes // 16
    size = max(1, most // (width * products_CV.dtype.itemsize))
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _logits(products_CV: Tensor, softcap: float | None, temperature: float) -> Tensor:
    logits_CV = cap(products_CV, softcap)
    return logits_CV if temperature == 1.0 else logits_CV / temperature


def cap(products_CV: Tensor, softcap: float | None) -> Tensor:
    return products_CV if softcap is None else softcap * torch.tanh(products_CV / softcap)
