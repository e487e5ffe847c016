"""Replay of routes for each kind of transformers router, written out.

This is part of the reference and shares no code with the replay that it checks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from automodel_rl.families.family import Family

Weighed = tuple[Tensor, Tensor]
"""Scores of all experts, [n, E], and weights of the chosen ones, [n, K]."""


def routed(family: Family, router: Any, hidden: Tensor, live: Tensor, route: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a router's output when tokens follow given routes.

    Args:
        router: the transformers module.
        hidden: hidden states, [1, n, H] or [n, H].
        live: experts that the router would choose, [n, K]; used where the route is negative.
        route: experts of the route, [n, K].

    Returns:
        Logits, weights of the chosen experts, and the chosen experts.
    """
    hidden, route = hidden.reshape(-1, hidden.shape[-1]), route.to(live.device)
    chosen = torch.where(route < 0, live, route)
    scores, weights = _kind(family, router)(router, hidden, chosen)
    return scores, weights, chosen


def _kind(family: Family, router: Any) -> Callable[[Any, Tensor, Tensor], Weighed]:
    own = {*dict(router.named_parameters()), *vars(router)}
    by_sign: tuple[tuple[bool, Callable[[Any, Tensor, Tensor], Weighed]], ...] = (
        ("per_expert_scale" in own, _gemma),
        (family.router == "router" and not family.router_bias and "bias" not in own, _granite),
        ("wg.weight" in own, _hunyuan),
        ("norm_min" in own, _ernie),
        ("use_expert_bias" in own, _lfm),
        (bool(family.router_bias), _sigmoids),
        ("routed_scaling_factor" in own, _scaled_softmax),
        ("expert_selection_fn" in own, _cohere),
        ("bias" in own, _gpt_oss),
    )
    return next((kind for is_it, kind in by_sign if is_it), _softmax)


def _gemma(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    """Gemma 4: scores are probabilities."""
    scores = (router.norm(hidden) * router.scale * router.scalar_root_size) @ router.proj.weight.T
    weights = scores.float().softmax(1).gather(1, chosen)
    weights = weights / weights.sum(1, keepdim=True) * router.per_expert_scale[chosen]
    return scores.float().softmax(1), weights


def _granite(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    """Granite: softmax over the chosen experts only."""
    logits = (hidden @ router.weight.T).float()
    return logits, logits.gather(1, chosen).softmax(1).to(hidden.dtype)


def _hunyuan(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    logits = hidden.to(router.wg.weight.dtype) @ router.wg.weight.T
    weights = logits.float().softmax(1).gather(1, chosen)
    return logits, (weights / weights.sum(1, keepdim=True)).to(logits.dtype)


def _ernie(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    """ERNIE: excludes the bias, which only affects the choice."""
    logits = hidden.float() @ router.weight.float().T
    weights = logits.softmax(1).gather(1, chosen)
    return logits, (weights / weights.sum(1, keepdim=True).clamp(min=router.norm_min)).to(hidden.dtype)


def _lfm(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    """LFM2: sigmoids in the hidden states' dtype, without the bias."""
    logits = hidden @ router.weight.T
    weights = logits.sigmoid().gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-6)
    return logits, weights * router.routed_scaling_factor


def _sigmoids(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    """Sigmoids as in DeepSeek-V3, without the bias, which only affects the choice."""
    own, settings = dict(router.named_parameters()), vars(router)
    names = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
    scale = next((settings[name] for name in names if name in settings), None)
    is_late = scale is None or "route_scale" in settings  # Laguna and AFMoE round after the product
    wide = hidden.dtype if is_late else torch.float32
    weight = own["gate.weight"] if "gate.weight" in own else own["weight"]
    logits = (hidden.to(wide) @ weight.to(wide).T).float()
    if cap := settings.get("router_logit_softcapping"):
        logits = cap * torch.tanh(logits / cap)
    weights = logits.sigmoid().gather(1, chosen)
    if settings.get("norm_topk_prob", True):
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return logits, weights * (1.0 if scale is None else scale)


def _scaled_softmax(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    """DeepSeek-V2."""
    logits = hidden.float() @ router.weight.float().T
    return logits, logits.softmax(1).gather(1, chosen) * router.routed_scaling_factor


def _cohere(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    """Cohere: over the chosen experts only."""
    logits = hidden @ router.weight.T
    weights = logits.gather(1, chosen)
    if router.expert_selection_fn == "softmax":
        return logits, weights.float().softmax(1).to(hidden.dtype)
    weights = weights.sigmoid()
    return logits, weights / weights.sum(1, keepdim=True) if router.norm_topk_prob else weights


def _gpt_oss(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    """gpt-oss: softmax over the chosen experts only."""
    logits = hidden @ router.weight.T + router.bias
    return logits, logits.gather(1, chosen).softmax(1)


def _softmax(router: Any, hidden: Tensor, chosen: Tensor) -> Weighed:
    settings = vars(router)
    logits = hidden @ router.weight.T
    weights = logits.float().softmax(1).gather(1, chosen)
    if settings.get("norm_topk_prob", True):
        weights = weights / weights.sum(1, keepdim=True)
    return logits, weights.to(logits.dtype) if "norm_topk_prob" in settings else weights
