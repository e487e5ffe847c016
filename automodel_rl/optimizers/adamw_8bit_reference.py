"""8-bit AdamW on plain transformers in one process, in plain torch, with which `verify` compares layouts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.optimizers.adamw import plain_adamw
from automodel_rl.optimizers.description import LR_FACTOR, RunPlain
from automodel_rl.optimizers.observed_uses import observed_uses


def tree_values(sign_bits: int) -> Tensor:
    """Returns the values of the 8-bit dynamic tree (Dettmers et al., arXiv:2110.02861, figure 2), float64 [256],
    sorted.

    After the sign, zero bits count powers of a tenth, a one ends them, and the remaining bits are a linear fraction.
    The patterns without a one are 0 and 1.
    """
    found = [0.0, 1.0]
    bits = 8 - sign_bits
    for zeros in range(bits):
        rest = bits - 1 - zeros
        for fraction in range(2**rest):
            middle = 0.1 + 0.9 * (fraction + 0.5) / 2**rest
            found += [sign * middle * 10.0**-zeros for sign in ((1, -1) if sign_bits else (1,))]
    while len(found) > 256:  # unsigned, one value too many
        found.remove(min(value for value in found if value > 0))
    return torch.tensor(sorted(found), dtype=torch.float64)


def rounded(values: Tensor, tree: Tensor, step: int, block: int = 128) -> Tensor:
    """Rounds values [..., I] to 8 bits, block by block, as in a step.

    A value between two of the tree becomes the upper one if its relative distance from the lower one exceeds the
    fractional part of step phi + place (sqrt(2) - 1), where phi is the golden ratio minus 1 and place the index in
    the block.
    """
    phi, kept = 2 / (1 + 5**0.5), []
    for part in values.double().split(block, dim=-1):
        scale = part.abs().amax(-1, keepdim=True).float().double()
        relative = torch.where(scale > 0, part / scale, 0.0)[..., None]
        upper = (tree <= relative).sum(-1).clamp(1, 255)
        low, high = tree[upper - 1], tree[upper]
        place = torch.arange(part.shape[-1], dtype=torch.float64)
        bound = low + (high - low) * ((step * phi + place * (2**0.5 - 1)) % 1)
        kept.append(torch.where(relative[..., 0] > bound, high, low) * scale)
    return torch.cat(kept, -1).to(values.dtype)


class PlainAdamW8bit(torch.optim.Optimizer):
    """AdamW whose first moment and root of the second one are rounded to 8 bits after every step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes one step with the gradients of the weights."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                zeros = torch.zeros_like(weight)
                state = self.state[weight] or {"steps": 0, "m": zeros, "root": zeros}
                steps = state["steps"] + 1
                m = beta1 * state["m"] + (1 - beta1) * weight.grad
                root = torch.sqrt(beta2 * state["root"] ** 2 + (1 - beta2) * weight.grad**2)
                m_hat, root_hat = m / (1 - beta1**steps), root / (1 - beta2**steps) ** 0.5
                weight -= group["lr"] * (group["weight_decay"] * weight + m_hat / (root_hat + group["eps"]))
                self.state[weight] = {
                    "steps": steps,
                    "m": rounded(m, tree_values(1), steps),
                    "root": rounded(root, tree_values(0), steps),
                }


def reference(model: nn.Module, config: OptimizerConfig, run: RunPlain) -> list[torch.optim.Optimizer]:
    """PlainAdamW8bit for everything but vectors, AdamW for those."""
    decayed = observed_uses(model, run).decayed
    wide = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    decaying, others = ([p for p in wide if (p in decayed) == decays] for decays in (True, False))
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay, LR_FACTOR: 1.0},
        {"params": others, "weight_decay": 0.0, LR_FACTOR: 1.0},
    ]
    optimizer = PlainAdamW8bit(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})
    return [optimizer, plain_adamw((p for p in model.parameters() if p.ndim <= 1), decayed, config)]
