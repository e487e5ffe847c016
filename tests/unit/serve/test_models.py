"""Models that a service can have."""

from pathlib import Path

import peft
import pytest
from transformers import AutoModelForCausalLM

from automodel_rl.config import ModelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.serve.checks import check_model
from tests.tiny import save_tiny_model, save_tiny_multimodal_model


def test_a_model_with_encoders_is_refused(tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path / "hears", "qwen2_audio")
    with pytest.raises(InputError, match="a 'qwen2_audio' model has encoders: only text models are supported"):
        check_model(OpenedModel.open(ModelConfig(path=str(tmp_path / "hears"))))
    save_tiny_model(tmp_path / "reads")
    check_model(OpenedModel.open(ModelConfig(path=str(tmp_path / "reads"))))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["by path", "with model.lora"])
def test_adapters_with_lengths_of_rows_are_refused_also_by_their_folder(
    tmp_path: Path, lora: LoraConfig | None
) -> None:
    save_tiny_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapters")
    with pytest.raises(InputError, match=r"adapters use DoRA \(use_dora=True\)"):
        check_model(OpenedModel.open(ModelConfig(path=str(tmp_path / "adapters"), lora=lora)))
