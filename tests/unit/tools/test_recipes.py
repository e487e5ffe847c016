"""The recipes in configs/ fit the devices they are written for, by `plan`."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from automodel_rl.config import load_config
from automodel_rl.errors import DoesNotFitError
from automodel_rl.estimate.memory import RankMemory
from automodel_rl.estimate.rollout_phases import ASLEEP, rollout_phases
from automodel_rl.tools.plan.command import plan
from automodel_rl.tools.plan.devices import find_device

CONFIGS = Path(__file__).parents[3] / "configs"
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2_135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen3_0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3_32b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
        },
    },
    "llama3_70b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "moonlight_16b": {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "rope_theta": 50000.0,
        "max_position_embeddings": 8192,
    },
}
SHAPES["agents"] = SHAPES["qwen3_0.6b"]
TEACHER = SHAPES["qwen3_0.6b"] | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
TEACHER |= {"num_attention_heads": 32, "tie_word_embeddings": False}
"""A model of 8B parameters, from which a recipe distils."""

SHAPES["qwen3_8b"] = TEACHER
SHAPES["llama3_70b_nf4"] = SHAPES["llama3_70b"] | {
    "quantization_config": SHAPES["qwen3_32b"]["quantization_config"],
    "tie_word_embeddings": False,
}

DEVICES = dict.fromkeys(("qwen3_8b", "qwen3_32b", "llama3_70b_nf4"), "H100")
"""Devices of recipes that are not for an H200."""

FILES = [file for file in CONFIGS.glob("*/*.yaml") if file.stem != "serve"]  # a service is not planned
RECIPES = sorted((file.parent.name, file.stem) for file in FILES)


@pytest.mark.parametrize(("model", "algorithm"), RECIPES)
def test_recipes_fit_their_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, algorithm: str
) -> None:
    for name, shape in {"model": SHAPES[model], "teacher": TEACHER}.items():
        AutoConfig.for_model(**shape).save_pretrained(tmp_path / name)
    overrides = ["--model.path", str(tmp_path / "model")]
    if algorithm.startswith("distill"):
        overrides += ["--teachers.large.path", str(tmp_path / "teacher")]
    config = load_config(CONFIGS / model / f"{algorithm}.yaml", overrides)
    try:
        plan(config, None, find_device(DEVICES.get(model, "H200")), as_json=True)
    except DoesNotFitError as error:
        pytest.fail(str(error))
    assert json.loads(capsys.readouterr().out)["fits"]


H200 = find_device("H200").num_bytes
SIDE_BY_SIDE = ["--rollout.generator.memory_fraction", "0.5"]
APART = ["--rollout.generator.place", "[1]"]
IN_TURNS = [*SIDE_BY_SIDE, "--rollout.generator.sleep", "2", "--memory.offload", "{}"]


@pytest.mark.parametrize(
    ("overrides", "beside", "sync", "rollout"),
    [
        (["--rollout.generator", "transformers"], 1000, 1030, 1030),
        (SIDE_BY_SIDE, 0.5 * H200, 0.5 * H200 + 30, 0.5 * H200 + 30),
        ([*SIDE_BY_SIDE, "--memory.offload", "{}"], 0.5 * H200, 0.5 * H200 + 10, 0.5 * H200),
        (IN_TURNS, ASLEEP, ASLEEP + 1010, 0.5 * H200),
        ([*IN_TURNS, "--memory.offload.what", "[moments]"], ASLEEP, ASLEEP + 1010, 0.5 * H200 + 10),
        (
            [*IN_TURNS, "--rollout.generator.tensor_parallel", "2", "--parallel.dp_shard", "2"],
            ASLEEP,
            ASLEEP + 510,
            0.5 * H200,
        ),
        (APART, 0, 30, 30),
    ],
)
def test_plans_know_what_is_on_the_device_in_every_phase(
    overrides: list[str], beside: float, sync: float, rollout: float
) -> None:
    """A model of 1000 bytes, with 10 bytes of weights and 20 of moments on the rank."""
    config = load_config(CONFIGS / "qwen3_0.6b" / "grpo.yaml", overrides)
    rank = RankMemory(10, 20, 0, 0, 0, 0, 0, 0)
    found = rollout_phases(config, AutoConfig.for_model("qwen3"), 1000, rank, H200)
    buffers = 4 * 1000  # as large as the whole model, which is small
    assert found.beside_training == pytest.approx(beside + buffers)
    assert found.weight_sync == pytest.approx(sync + buffers)
    assert found.rollout == pytest.approx(rollout + buffers)


def test_a_plan_whose_rollouts_do_not_fit_says_how_they_may(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = dict(SHAPES["llama3_70b"])
    AutoConfig.for_model(shape.pop("model_type"), **shape).save_pretrained(tmp_path)
    file = CONFIGS / "llama3_70b" / "grpo_16_gpus.yaml"
    awake = load_config(
        file, ["--model.path", str(tmp_path), "--rollout.generator.sleep", "none", "--memory.offload", "null"]
    )
    with pytest.raises(DoesNotFitError, match="add --memory.offload {} --rollout.generator.sleep auto"):
        plan(awake, None, find_device("H200"), as_json=False)
    assert "in rollouts" in capsys.readouterr().out
