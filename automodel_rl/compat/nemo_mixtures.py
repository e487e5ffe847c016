"""nemo_automodel's mixtures with the signatures and names of transformers' modules, so that the package treats both
alike.

nemo_automodel provides the layers: projections, norms, rotary embeddings, routers and shared experts, on packed
tokens without padding (THD). Experts are transformers' modules, which this package shards and runs
(mixture/experts.py), and attention is one of this package's functions (model/attention.py).

Shape letters: t tokens of this rank, H hidden size, D head dim. Checked with nemo_automodel 0.7.0.
"""

import dataclasses
import importlib
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from automodel_rl.compat.nemo import only_errors_logged
from automodel_rl.errors import InputError
from automodel_rl.launch.quiet import quiet_imports

SAME = 1e-6
"""Largest relative difference of rotary frequencies that counts as rounding."""


def nemo_mixture(class_path: tuple[str, str], config: PretrainedConfig, plain: Any, router: str, bias: str) -> Any:
    """Builds a mixture of nemo_automodel's own class, with transformers' parameter names and shapes.

    Args:
        class_path: module and name of the class.
        config: the checkpoint's config; its dtype is set.
        plain: transformers' model of the same config, without storage; provides experts and attention function.
        bias: name of the bias by which a router chooses experts; "" if there is none.

    Raises:
        InputError: the class computes something different from transformers with this config.
    """
    with quiet_imports():
        from nemo_automodel.components.models.common import BackendConfig

    if reason := _what_differs(config):
        raise InputError(f"model.implementation=nemo_automodel: {reason}: use transformers")
    module, name = class_path
    config.dtype = next(plain.parameters()).dtype
    has_sinks = any(path.endswith(".sinks") for path, _ in plain.named_parameters())
    # gpt_oss has sinks as parameters only with flex attention, which is never called.
    backend = BackendConfig(
        attn="flex" if has_sinks else "sdpa", linear="torch", rms_norm="torch", experts="torch", dispatcher="torch"
    )
    routers: dict[str, Any] = {"aux_loss_coeff": 0.0, "gate_bias_update_factor": 0.0}
    if bias:  # with this function, biases cannot bring back excluded groups
        routers |= {"force_e_score_correction_bias": True, "score_func": "sigmoid_with_bias"}
    current = mock.patch.object(torch.cuda, "current_device", return_value=0)  # queried but not used
    with only_errors_logged(), current:
        model = getattr(importlib.import_module(module), name)(config, backend=backend, moe_overrides=routers)
    model.model.rotary_emb = _rotary_of(model.model, plain)
    for layer, own in zip(model.model.layers.values(), plain.model.layers, strict=True):
        _adapt_attention(layer.self_attn, own.self_attn, config)
        _adapt_mixture(layer.mlp, own.mlp, router)
        layer.forward = MethodType(_layer_forward, layer)
    shapes, of_plain = ({n: t.shape for n, t in m.state_dict().items()} for m in (model, plain))
    if other := sorted(dict(shapes.items() ^ of_plain.items())):
        raise InputError(
            f"model.implementation=nemo_automodel: its class and that of transformers differ in {other[0]}, which one "
            "of them lacks or has in another shape: use transformers"
        )
    return model


def _what_differs(config: PretrainedConfig) -> str | None:
    """Returns how nemo_automodel's classes differ from transformers' with this config; None if they do not."""
    values = config.to_dict()
    if values.get("tie_word_embeddings"):
        return "its mixtures do not tie the head to the embedding"
    if values.get("hidden_act") != "silu":
        return f"its mixtures use SiLU for hidden_act={values.get('hidden_act')}"
    if not values.get("rope_interleave", True):
        return "its class rotates adjacent dims despite rope_interleave=false"
    if values.get("norm_topk_prob") and values["num_experts_per_tok"] == 1:
        return "its routers do not normalise the weight of a single expert (num_experts_per_tok=1, norm_topk_prob=true)"
    return None


def _layer_forward(
    layer: Any, hidden: Tensor, *, position_embeddings: Tensor, microbatch: Any, cp_group: Any, **_: Any
) -> Tensor:
    """A layer's own forward in the signature of transformers' layers, [1, t, H] -> [1, t, H]."""
    layer.self_attn.attn_func.enter(microbatch, cp_group)
    return type(layer).forward(layer, hidden.squeeze(0), freqs_cis=position_embeddings).unsqueeze(0)


class _Attention:
    """The attention function of a layer, called with queries, keys and values [t, heads, D]. `config` names the
    registered function, as in transformers' layers."""

    def __init__(self, module: Any, config: PretrainedConfig):
        self.module, self.config = module, config
        self.scaling: float = module.softmax_scale
        self.window: int | None = dict(vars(module)).get("sliding_window")
        self.microbatch: Any = None
        self.cp_group: Any = None

    def enter(self, microbatch: Any, cp_group: Any) -> None:
        """Sets the microbatch that the layer computes."""
        self.microbatch, self.cp_group = microbatch, cp_group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        function: Any = AttentionInterface()[self.config._attn_implementation]
        output, _weights = function(
            self.module,
            *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
            None,
            microbatch=self.microbatch,
            cp_group=self.cp_group,
            scaling=self.scaling,
            sliding_window=self.window,
            s_aux=dict(self.module.named_parameters(recurse=False)).get("sinks"),
        )
        return output.squeeze(0)


def _adapt_attention(attention: Any, own: Any, config: PretrainedConfig) -> None:
    if "softmax_scale" not in vars(attention):
        attention.softmax_scale = attention.head_dim**-0.5
    if abs(attention.softmax_scale / own.scaling - 1) > SAME:
        raise _different(f"scores times {attention.softmax_scale:.6g}, where transformers has {own.scaling:.6g}")
    attention.attn_module, attention.attn_func = None, _Attention(attention, config)
    # With this name its forward passes queries, keys and values on unchanged.
    attention.backend = dataclasses.replace(attention.backend, attn="te")


def _adapt_mixture(block: Any, own: Any, router: str) -> None:
    """Puts transformers' experts into a layer, and gives the router transformers' name."""
    experts = dict(own.named_children()).get("experts")
    if experts is None:  # a dense layer
        return
    experts.forward = MethodType(_experts_forward, experts)
    block.experts = experts
    gate = block.gate
    gate.num_experts, gate.top_k = gate.n_experts, gate.topk
    if router != "gate":
        del block.gate
        block.add_module(router, gate)
        object.__setattr__(block, "gate", gate)  # for its forward; not registered a second time


def _experts_forward(experts: Any, hidden: Tensor, _: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The forward of transformers' experts in nemo_automodel's signature."""
    return type(experts).forward(experts, hidden, chosen, weights)


class _Rotary(nn.Module):
    """Rotary embeddings of positions, as the class's own model computes them.

    Attributes:
        inv_freq: the frequencies, fp32 [D / 2]. A buffer, so that it moves with the model.
    """

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, concentration: float):
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.concentration = concentration

    def _compute_concentration_and_inv_freq(self) -> tuple[float, Tensor]:
        return self.concentration, self.inv_freq

    def forward(self, _: Tensor, positions: Tensor) -> Tensor:
        """Maps positions [1, t] to cosines and sines [t, D]."""
        from nemo_automodel.components.models.gpt_oss.rope_utils import position_ids_to_freqs_cis

        rotary: Any = self
        return position_ids_to_freqs_cis(rotary, positions, qkv_format="thd", for_fused_rope=False)


class _ComplexRotary(_Rotary):
    """Rotary embeddings for models that rotate pairs as complex numbers."""

    def forward(self, _: Tensor, positions: Tensor) -> Tensor:
        """Maps positions [1, t] to complex numbers [t, D / 2]."""
        from nemo_automodel.components.models.deepseek_v3.rope_utils import freqs_cis_from_position_ids

        return freqs_cis_from_position_ids(positions, self.inv_freq, qkv_format="thd", for_fused_rope=False)


def _rotary_of(body: Any, plain: Any) -> _Rotary:
    """Returns the rotary embeddings after comparing them with transformers': the class treats some kinds of scaling
    differently, or ignores them."""
    table = dict(body.named_buffers(recurse=False)).get("freqs_cis")
    if table is not None:
        rotary: _Rotary = _ComplexRotary(table, 1.0)
        del body.freqs_cis
    else:
        body.rotary_emb.device = torch.device("cpu")
        try:
            concentration, inv_freq = body.rotary_emb._compute_concentration_and_inv_freq()
        except AssertionError:
            raise _different("no rotary frequencies") from None
        rotary = _Rotary(inv_freq, concentration)
    own = plain.model.rotary_emb
    difference = (rotary.inv_freq / own.inv_freq - 1).abs().max().item()
    if difference > SAME or abs(rotary.concentration / own.attention_scaling - 1) > SAME:
        factors = f"{rotary.concentration:.4g} for a factor of {own.attention_scaling:.4g}"
        raise _different(f"rotary frequencies that differ by {difference:.2g}, relatively, and {factors}")
    return rotary


def _different(what: str) -> InputError:
    return InputError(
        f"model.implementation=nemo_automodel: its class has {what}, for the rope_parameters of this config.json: use "
        "transformers"
    )
