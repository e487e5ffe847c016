"""What the table gets to know of a model, and what it refuses of a model's config alone."""

from pathlib import Path

import pytest
from transformers import Gemma3nConfig, GPT2Config, MambaConfig, PretrainedConfig, Qwen3Config

from automodel_rl.config import MemoryConfig, ModelConfig, ParallelConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.read import read_config
from automodel_rl.support.combination import Combination
from automodel_rl.support.description import describe_model
from automodel_rl.support.table import check_supported
from tests.tiny import save_tiny_model, save_tiny_multimodal_model, tiny_config


def check(config: PretrainedConfig) -> None:
    check_supported(Combination(describe_model(config), ModelConfig(path="m"), ParallelConfig(), MemoryConfig()))


@pytest.mark.parametrize(("family", "num_experts"), [("mixtral", 4), ("deepseek_v3", 8), ("gpt_oss", 4), ("qwen3", 0)])
def test_the_description_counts_experts(tmp_path: Path, family: str, num_experts: int) -> None:
    save_tiny_model(tmp_path, family, num_layers=2)
    assert describe_model(read_config(tmp_path)).num_experts == num_experts


@pytest.mark.parametrize("config", [GPT2Config(), MambaConfig(), Gemma3nConfig()], ids=lambda c: c.model_type)
def test_models_of_other_families_are_refused_and_not_looked_into(config: PretrainedConfig) -> None:
    with pytest.raises(InputError, match=f"a '{config.model_type}' model .* is not supported: use one of llama"):
        check(config)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, 40960),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}, 131072),
    ],
)
def test_the_context_counts_scaled_rotary_embeddings(rope: dict, context: int) -> None:
    config = Qwen3Config(max_position_embeddings=40960, rope_parameters=rope)
    assert describe_model(config).context == context


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "attention_dropout"),
        ("mixtral", "router_jitter_noise"),
        ("qwen3", "residual_dropout"),
        ("qwen2", "resid_pdrop"),
        ("llama", "embd_pdrop"),
    ],
)
def test_whatever_makes_training_random_is_refused_by_its_key(family: str, key: str) -> None:
    for size, refused in ((0.1, True), (0.0, False)):
        description = describe_model(tiny_config(family, **{key: size, "classifier_dropout": 1}))
        assert description.noise == ({key: size} if refused else {})
    noisy = tiny_config(family, **{key: 0.1})
    with pytest.raises(InputError, match=f"config.json has {key}=0.1, but training here is not random"):
        check(noisy)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_length_of_a_sequence_are_refused(kind: str) -> None:
    factors = (
        {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0} if kind == "longrope" else {"factor": 2.0}
    )
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 8, **factors}
    config = tiny_config("llama", max_position_embeddings=16, rope_parameters=rope)
    with pytest.raises(InputError, match=f"config.json has rope_type={kind}"):
        check(config)


def test_rotary_kinds_are_found_in_every_kind_of_layers() -> None:
    assert describe_model(tiny_config("gemma3_text")).rope_types == ("default", "default")


@pytest.mark.parametrize(
    ("family", "said", "hidden"), [("qwen3_vl", True, False), ("qwen3_vl", False, True), ("qwen2_5_vl", False, False)]
)
def test_the_order_of_rotary_axes_may_be_hidden(tmp_path: Path, family: str, said: bool, hidden: bool) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text = {"rope_parameters": rope | ({"mrope_interleaved": True} if said else {})}
    save_tiny_multimodal_model(tmp_path, family, text=text)
    assert describe_model(read_config(tmp_path)).hides_interleaving == hidden
