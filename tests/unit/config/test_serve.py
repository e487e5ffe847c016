"""Configs of a service: what is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from automodel_rl.config import LoraConfig, ModelConfig, ServeConfig

LORA = LoraConfig(rank=8)


@pytest.mark.parametrize(
    ("lora", "values", "text"),
    [
        (None, {"memory": {"offload_optimizer": True}}, "offload cannot be served"),
        (None, {"memory": {"mlp_tile": 64}}, "mlp_tile cannot be served"),
        (LoraConfig(dropout=0.1), {}, "dropout, dora and modules_to_save cannot be served"),
        (LoraConfig(modules_to_save=("lm_head",)), {}, "dropout, dora and modules_to_save cannot be served"),
        (LORA, {"host": "0.0.0.0"}, "set your own key"),
        (LORA, {"key": "secret-secret"}, "pattern"),
        (LORA, {"key": "tml-1"}, "12 characters"),
    ],
)
def test_services_that_cannot_be_are_refused(lora: LoraConfig | None, values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        ServeConfig(output="x", model=ModelConfig(path="y", lora=lora), **values)


def test_other_addresses_are_served_with_a_key() -> None:
    config = ServeConfig(output="x", model=ModelConfig(path="y", lora=LORA), host="0.0.0.0", key="tml-12345678")
    assert config.base_name == "y"
    assert config.address == "0.0.0.0:8000"


def test_a_linear_head_is_not_served() -> None:
    with pytest.raises(ValidationError, match="needs the vocabulary head"):
        ServeConfig(output="x", model=ModelConfig(path="y", num_labels=1))
