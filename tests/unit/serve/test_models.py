"""Models that a service can have."""

from pathlib import Path

import pytest

from automodel_rl.config import ModelConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.serve.checks import check_model
from tests.tiny import save_tiny_model, save_tiny_multimodal_model


def test_a_model_with_encoders_is_refused(tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path / "hears", "qwen2_audio")
    with pytest.raises(InputError, match="a 'qwen2_audio' model has encoders, and models of text alone are served"):
        check_model(OpenedModel.open(ModelConfig(path=str(tmp_path / "hears"))))
    save_tiny_model(tmp_path / "reads")
    check_model(OpenedModel.open(ModelConfig(path=str(tmp_path / "reads"))))
