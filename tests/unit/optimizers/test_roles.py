"""What decays and what Muon trains, in every family: by modules, and by what a plain model is seen to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from automodel_rl.config import OptimizerConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.model.build import build_empty_model
from automodel_rl.optimizers import OPTIMIZERS
from automodel_rl.tools.verify.one_process import OneProcess, Training
from tests.needs import needs_nemo
from tests.tiny import MULTIMODAL_CONFIGS, save_tiny_model, save_tiny_multimodal_model
from tests.tiny_families import SIZES
from tests.unit.optimizers.test_adamw import no_groups

Treatments = dict[str, tuple[str, bool]]
"""By name of a parameter AdamW or Muon, and whether it decays."""


def treatments(optimizers: list[torch.optim.Optimizer], named: dict[str, Any]) -> Treatments:
    found = {}
    for optimizer in optimizers:
        kind = "AdamW" if isinstance(optimizer, torch.optim.AdamW) else "Muon"
        for group in optimizer.param_groups:
            found |= {p.untyped_storage()._cdata: (kind, group["weight_decay"] > 0) for p in group["params"]}
    return {name: found[p.untyped_storage()._cdata] for name, p in named.items() if p.requires_grad}


def by_modules(folder: Path, optimizer: OptimizerName, implementation: Any = "transformers") -> Treatments:
    config = AutoConfig.from_pretrained(folder)
    found: Treatments = {}
    for part in build_empty_model(config, implementation, torch.float64, "eager", untie=False).parts:
        built = OPTIMIZERS[optimizer].build(part, OptimizerConfig(name=optimizer, weight_decay=0.1), no_groups)
        of_part = treatments(built, dict(part.named_parameters(remove_duplicate=False)))
        states = OPTIMIZERS[optimizer].state_names(part)
        assert {name: len(state.moments) for name, state in states.items()} == {
            name: 1 if kind == "Muon" else 2 for name, (kind, _) in of_part.items()
        }
        found |= of_part
    return found


def by_use(folder: Path, optimizer: OptimizerName) -> Treatments:
    training = Training(optimizer=optimizer, weight_decay=0.1)
    plain = OneProcess(folder, torch.float64, training, torch.device("cpu"))
    return treatments(plain.optimizers, dict(plain.parameters()))


UNUSED = "audio_bos_eos_token.weight"
"""A parameter that takes no part in plain transformers' forward."""


def check(folder: Path, optimizer: OptimizerName) -> Treatments:
    own, plain = by_modules(folder, optimizer), by_use(folder, optimizer)
    different = {name: (of, plain[name]) for name, of in own.items() if plain[name] != of}
    assert {name: pair for name, pair in different.items() if not name.endswith(UNUSED)} == {}
    return own


@pytest.mark.parametrize("family", SIZES)
def test_modules_and_uses_tell_the_same_roles(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family, num_layers=2, tied=family == "qwen3")
    found = check(tmp_path, "muon")
    assert {kind for name, (kind, _) in found.items() if name.endswith("_proj.weight")} == {"Muon"}


@pytest.mark.parametrize("family", MULTIMODAL_CONFIGS)
def test_modules_and_uses_of_models_with_encoders_tell_the_same_roles(tmp_path: Path, family: str) -> None:
    save_tiny_multimodal_model(tmp_path, family, num_layers=2)
    check(tmp_path, "muon")


COHERE = {
    "Muon": [*(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))],
    "decayed": ["model.embed_tokens"],
    "not decayed": ["self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "model.norm"],
}
HUNYUAN = {
    "Muon": [
        *(f"self_attn.{n}_proj" for n in "qkvo"),
        *(f"mlp.shared_mlp.{n}_proj" for n in ("gate", "up", "down")),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    ],
    "decayed": ["model.embed_tokens", "lm_head", "mlp.gate.wg"],
    "not decayed": [
        *("self_attn.query_layernorm", "self_attn.key_layernorm"),
        *("input_layernorm", "post_attention_layernorm", "model.norm"),
    ],
}
GPT_OSS = {
    "Muon": [*(f"self_attn.{n}_proj" for n in "qkvo"), "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "decayed": ["model.embed_tokens", "lm_head", "mlp.router"],
    "not decayed": [
        *(f"self_attn.{n}_proj.bias" for n in "qkvo"),
        *("self_attn.sinks", "mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"),
        *("input_layernorm", "post_attention_layernorm", "model.norm"),
    ],
}
"""Written by hand from the modules' own code; of one layer."""


@pytest.mark.parametrize(
    ("family", "expected"), [("cohere", COHERE), ("hunyuan_v1_moe", HUNYUAN), ("gpt_oss", GPT_OSS)]
)
def test_roles_are_those_written_down(tmp_path: Path, family: str, expected: dict[str, list[str]]) -> None:
    save_tiny_model(tmp_path, family, num_layers=1, tied=family == "cohere")
    of_kinds: dict[str, list[str]] = {kind: [] for kind in expected}
    for name, (kind, decays) in by_modules(tmp_path, "muon").items():
        assert kind == "AdamW" or decays
        short = name.removeprefix("model.layers.0.").removesuffix(".weight")
        of_kinds["Muon" if kind == "Muon" else "decayed" if decays else "not decayed"].append(short)
    tied = ["lm_head"] if family == "cohere" else []
    assert {kind: sorted(names) for kind, names in of_kinds.items()} == {
        kind: sorted([*names, *(tied if kind == "decayed" else [])]) for kind, names in expected.items()
    }
    assert {n: decays for n, (_, decays) in by_modules(tmp_path, "adamw").items()} == {
        n: decays for n, (_, decays) in by_modules(tmp_path, "muon").items()
    }
    check(tmp_path, "adamw")


@needs_nemo
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_classes_of_nemo_automodel_have_the_same_roles(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family, num_layers=2)
    assert by_modules(tmp_path, "muon", "nemo_automodel") == by_modules(tmp_path, "muon")
