"""The losses once more, on padded [B, S] tensors and from the papers' formulas: one sequence after the other.

Nothing here is shared with the package. Every tensor is aligned with tokens; masks mark the tokens that count.
"""

import math

import torch
from torch import Tensor


def nll(logprobs: Tensor, mask: Tensor) -> Tensor:
    total = sum(-logprobs[b, t] for b in range(len(mask)) for t in range(mask.shape[1]) if mask[b, t])
    return total / mask.sum()


def dpo(logprobs: Tensor, ref: Tensor, mask: Tensor, c: dict) -> tuple[Tensor, dict]:
    """Microbatches 0, 2, 4, ... are chosen, 1, 3, 5, ... rejected."""
    losses, right, rewards = [], [], []
    for b in range(0, len(mask), 2):
        scores = []
        for microbatch in (b, b + 1):
            keep = mask[microbatch].bool()
            ours, theirs = logprobs[microbatch][keep], ref[microbatch][keep]
            per_token = ours if c["variant"] == "simpo" else ours - theirs
            averaged = c["variant"] in ("ipo", "simpo") or c["length_normalised"]
            scores.append(per_token.mean() if averaged else per_token.sum())
        m = scores[0] - scores[1]
        if c["variant"] == "dpo":
            e = c["label_smoothing"]
            loss = -(1 - e) * torch.log(torch.sigmoid(c["beta"] * m)) - e * torch.log(torch.sigmoid(-c["beta"] * m))
        elif c["variant"] == "ipo":
            loss = (m - 1 / (2 * c["beta"])) ** 2
        else:
            loss = -torch.log(torch.sigmoid(c["beta"] * m - c["gamma"]))
        loss = loss - c["sft_weight"] * logprobs[b][mask[b].bool()].mean()
        losses.append(loss)
        right.append(float(m > 0))
        rewards.append([c["beta"] * score.item() for score in scores])
    return torch.stack(losses).mean(), {
        "train/accuracy": sum(right) / len(right),
        "train/margin": sum(chosen - rejected for chosen, rejected in rewards) / len(rewards),
        "train/reward_chosen": sum(chosen for chosen, _ in rewards) / len(rewards),
        "train/reward_rejected": sum(rejected for _, rejected in rewards) / len(rewards),
    }


def policy_gradient(
    logprobs: Tensor, entropy: Tensor, old: Tensor, rollout: Tensor, ref: Tensor, adv: Tensor, mask: Tensor, c: dict
) -> tuple[Tensor, dict]:
    per_sequence = []
    seen: dict[str, list[float]] = {}
    outside: list[tuple[int, bool]] = []  # of tokens, with their sequence
    for b in range(len(mask)):
        keep = mask[b].bool()
        new, o, g, r, a, h = (x[b][keep] for x in (logprobs, old, rollout, ref, adv, entropy))
        if c["on_policy"]:
            o = new.detach()
        ratio = torch.exp(new - o)
        if c["ratio"] == "sequence":
            ratio = torch.exp((new - o).sum() / max(len(new), 1)).detach() * new.exp() / new.exp().detach()
        low, high = 1 - c["clip_low"], 1 + c["clip_high"]
        terms = []
        for t in range(len(new)):
            q, q_clipped = ratio[t], torch.clip(ratio[t], low, high)
            if c["surrogate"] == "cispo":
                objective = q_clipped.detach() * a[t] * new[t]
                is_clipped = q != q_clipped
            else:
                objective = torch.minimum(q * a[t], q_clipped * a[t])
                if c["dual_clip"] is not None and a[t] < 0:
                    objective = torch.maximum(objective, c["dual_clip"] * a[t])
                is_clipped = objective != q * a[t]
            w = torch.exp(o[t] - g[t]).item()
            weight, is_outside = corrected(w, math.exp((o - g).mean().item()), *c["correction"])
            objective = objective * weight
            x = r[t] - new[t]
            k = {"k1": -x, "k2": x**2 / 2, "k3": torch.exp(x) - 1 - x}[c["kl"]]
            if c["kl"] != "k2":
                k = k * torch.exp(new[t] - new[t].detach())
            metrics = {"ratio_mean": q, "clip_fraction": is_clipped, "logprob_error": max(w, 1 / w), "kl_ref": k}
            metrics |= {"entropy": h[t]} | errors_of_generator(o[t].item(), g[t].item())
            if c["correction"][0] != "none":
                metrics |= {"correction_weight": weight, "correction_weight_square": weight**2}
                outside.append((b, is_outside))
            for name, value in metrics.items():
                seen.setdefault(f"train/{name}", []).append(float(torch.as_tensor(value).detach()))
            terms.append(-objective + c["kl_coefficient"] * k - c["entropy"] * h[t])
        per_sequence.append(terms)
    flat = [term for terms in per_sequence for term in terms]
    loss = {
        "token": sum(flat) / len(flat),
        "sequence": sum(sum(terms) / max(len(terms), 1) for terms in per_sequence) / len(per_sequence),
        "constant": sum(flat) / c["longest"] / len(per_sequence),
    }[c["normalise"]]
    metrics = {name: sum(values) / len(values) for name, values in seen.items()}
    if outside:
        by_token = [is_outside for _, is_outside in outside]
        by_sequence = list(dict(outside).values())
        counted = by_sequence if c["correction"][0] == "sequence_mask" else by_token
        metrics["train/is_oob_ratio"] = sum(counted) / len(counted)
    return loss, metrics


def corrected(w: float, geometric: float, kind: str, lowest: float, highest: float) -> tuple[float, bool]:
    """The weight of a token, and whether what is compared lies outside of the bounds."""
    compared = geometric if kind == "sequence_mask" else w
    is_outside = not lowest <= compared <= highest
    return {"none": 1.0, "truncate": min(max(w, lowest), highest)}.get(kind, 0.0 if is_outside else w), is_outside


def errors_of_generator(p: float, g: float) -> dict[str, float]:
    """NeMo RL's metrics for a token, of the trainer's log-probability p and the generator's g."""
    m = math.log(math.exp(p) / 2 + math.exp(g) / 2)
    return {
        "token_mult_prob_error": math.exp(abs(g - p)),
        "gen_kl_error": math.exp(p - g) - (p - g) - 1,
        "policy_kl_error": math.exp(g - p) - (g - p) - 1,
        "js_divergence_error": (math.exp(p - m) - (p - m) - 1) / 2 + (math.exp(g - m) - (g - m) - 1) / 2,
        "sampling_importance_ratio": math.exp(p - g),
    }
