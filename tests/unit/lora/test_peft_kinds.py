"""Kinds of LoRA that PEFT writes: which are trained and merged here, and which are refused."""

import dataclasses
import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_rl.config import ModelConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.find import find_model
from automodel_rl.lora.peft import AdapterFolder
from automodel_rl.lora.peft_kinds import BEGINNING, FOLLOWED, HARMLESS, REFUSED, problem_of
from tests.tiny import save_tiny_model

KNOWN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def test_every_key_of_the_installed_peft_is_known() -> None:
    keys = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert keys == FOLLOWED | HARMLESS | REFUSED | {BEGINNING}
    defaults = peft.LoraConfig(r=4, target_modules=["q_proj"]).to_dict() | {"peft_type": "LORA"}
    assert problem_of(defaults) == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"init_lora_weights": "corda"}, "init_lora_weights=corda cannot"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4 cannot"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights=lora_ga cannot"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights=loftq cannot"),
        ({"init_lora_weights": "mica"}, "init_lora_weights=mica cannot"),
        ({"use_bdlora": {"nblocks": 2}}, "adapters with use_bdlora="),
        ({"kasa_config": {"a": 1}}, "adapters with kasa_config="),
        ({"use_wonders": True}, "use_wonders=True, an unknown key, cannot be trained or merged"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
    ],
)
def test_adapters_of_other_kinds_are_refused_by_name(values: dict[str, object], message: str) -> None:
    assert message in problem_of(KNOWN | values)


@pytest.mark.parametrize(
    "values",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": False},
        {"use_wonders": None, "merge_weights": False, "bias": "none", "rank_pattern": {}},
        {"auto_mapping": {"base_model_class": "Qwen3ForCausalLM", "unsloth_fixed": True}, "task_type": "CAUSAL_LM"},
    ],
)
def test_what_changes_no_number_is_accepted(values: dict[str, object]) -> None:
    assert problem_of(KNOWN | values) == ""


@pytest.mark.parametrize("beginning", ["pissa", "olora"])
def test_adapters_that_change_the_base_model_are_refused(tmp_path: Path, beginning: str) -> None:
    save_tiny_model(tmp_path / "base", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=beginning, task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapters")
    for merges in (True, False):
        with pytest.raises(
            InputError, match=f"{beginning} cannot be trained or merged here, because PEFT changes the base"
        ):
            AdapterFolder(tmp_path / "adapters", merges)


def test_another_revision_of_the_base_model_is_not_taken_for_its_newest(tmp_path: Path) -> None:
    values = KNOWN | {"base_model_name_or_path": "a/model", "revision": "v1", "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match="revision=v1: pass the folder of that revision of a/model in model.path"):
        find_model(ModelConfig(path=str(tmp_path)))
