"""A generator's copy of a model that gets adapters alone."""

import dataclasses
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from automodel_rl.config.model import LoraConfig
from automodel_rl.data.media import MediaReaders
from automodel_rl.families.file_names import FileNames
from automodel_rl.families.known import MULTIMODAL_FAMILIES, checkpoint_family, language_config
from automodel_rl.generators.model_copy import ModelCopy, build_model, synced_tensors
from automodel_rl.hf.names import pieces
from automodel_rl.hf.read import persistent_tensors, read_config
from automodel_rl.lora.experts import STACKED
from automodel_rl.lora.peft import AdapterFolder
from automodel_rl.model.encoder import split_modules
from tests.tiny import save_tiny_model, save_tiny_multimodal_model


@pytest.mark.parametrize(
    ("family", "names"),
    [(family, names) for family in MULTIMODAL_FAMILIES for names in MULTIMODAL_FAMILIES[family].file_names],
    ids=lambda value: value if isinstance(value, str) else value.identifying_pattern or "usual",
)
def test_a_copy_takes_the_names_that_the_trained_model_sends(tmp_path: Path, family: str, names: FileNames) -> None:
    save_tiny_multimodal_model(tmp_path, family)
    config = read_config(tmp_path)
    files = dataclasses.replace(checkpoint_family(config), file_names=names)
    copy = ModelCopy(config, files, torch.float32, torch.device("cpu"), media=MediaReaders({}))
    model = build_model(copy)
    language, encoders = split_modules(model, language_config(config))
    sent = {
        piece.name
        for part in (language, *encoders.values())
        for name, tensor in persistent_tensors(part)
        for piece in pieces(name, tuple(tensor.shape), files)
    }
    assert synced_tensors(model, copy).keys() == sent


@pytest.mark.parametrize(("family", "attention"), [("qwen3_moe", "sdpa"), ("gpt_oss", "eager")])
def test_a_copy_computes_with_the_adapters_of_its_experts(tmp_path: Path, family: str, attention: str) -> None:
    save_tiny_model(tmp_path, family)
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation=attention, experts_implementation="eager"
    )
    experts = [f"mlp.experts.{name}" for name in STACKED]
    adapted = get_peft_model(plain, PeftConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=experts))
    for parameter in (parameter for parameter in adapted.parameters() if parameter.requires_grad):
        torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapters")
    lora = LoraConfig(rank=4, alpha=8, targets=("q_proj", "experts"))
    copy = ModelCopy(
        plain.config, checkpoint_family(plain.config), torch.float64, torch.device("cpu"), (lora, tmp_path)
    )
    model = build_model(copy)
    homes, sent = synced_tensors(model, copy), AdapterFolder(tmp_path / "adapters").tensors
    assert homes.keys() == sent.keys()
    for name, tensor in sent.items():
        homes[name].copy_(tensor)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, adapted(ids).logits, rtol=0, atol=1e-9)
        with adapted.disable_adapter():
            assert (model(ids).logits - adapted(ids).logits).abs().max() > 1e-3
