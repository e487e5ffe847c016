"""Exports keep the names that transformers 4 reads, where the source has them, and stay the same model."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from automodel_rl.hf.write import write_description

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
OLD: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "use_cache": True,
        "_name_or_path": "somewhere",
        "transformers_version": "4.43.0",
    },
    "yarn": {
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "use_sliding_window": False,
        "max_window_layers": 2,
    },
    "windows": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 512,
        "sliding_window_pattern": 2,
    },
    "partly rotated": {"model_type": "glm4", "head_dim": 8, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "nested": {
        "model_type": "llava",
        "torch_dtype": "float16",
        "text_config": {"model_type": "llama", "rope_theta": 500000.0, "torch_dtype": "float16", **SMALL},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 12, "patch_size": 4, **VISION},
    },
    "quantized": {
        "model_type": "qwen3",
        "head_dim": 8,
        "rope_theta": 1e6,
        "quantization_config": {"quant_method": "fp8"},
    },
}


def exported(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The config.json of an export of a checkpoint with this one. Both are the same model for this transformers."""
    source, out = folder / "source", folder / "out"
    source.mkdir(), out.mkdir()
    (source / "config.json").write_text(json.dumps(SMALL | values))
    config = AutoConfig.from_pretrained(source)
    write_description(out, config, None, source)
    drop = {"transformers_version", "quantization_config", "_name_or_path"}
    then, now = (AutoConfig.from_pretrained(of).to_dict() for of in (source, out))
    assert {k: v for k, v in now.items() if k not in drop} == {k: v for k, v in then.items() if k not in drop}
    found: dict[str, Any] = json.loads((out / "config.json").read_text())
    return found


@pytest.mark.parametrize("kind", OLD)
def test_names_that_transformers_4_reads_stay(tmp_path: Path, kind: str) -> None:
    values = OLD[kind]
    written = exported(tmp_path, values)
    gone = {"_name_or_path", "transformers_version", "quantization_config", "text_config", "vision_config"}
    assert {key: written.get(key) for key in values.keys() - gone} == {k: values[k] for k in values.keys() - gone}
    for part in ("text_config", "vision_config"):
        assert {key: written[part].get(key) for key in values.get(part, {})} == values.get(part, {})
    assert "quantization_config" not in written
    assert "_name_or_path" not in written


def test_the_older_name_of_the_dtype_has_the_new_value(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    (source / "config.json").write_text(json.dumps(SMALL | OLD["nested"]))
    config = AutoConfig.from_pretrained(source)
    config.dtype = "float32"
    write_description(out, config, None, source)
    written = json.loads((out / "config.json").read_text())
    assert (written["dtype"], written["torch_dtype"]) == ("float32", "float32")


def test_settings_of_a_language_model_at_the_top_go_where_the_new_form_has_them(tmp_path: Path) -> None:
    """Qwen2.5-VL's published files."""
    mrope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 32}
    written = exported(
        tmp_path,
        {"model_type": "qwen2_5_vl", "rope_theta": 1000000.0, "rope_scaling": mrope, "vision_config": vision},
    )
    assert written["text_config"]["rope_theta"] == 1000000.0
    assert written["text_config"]["rope_scaling"]["mrope_section"] == [1, 1, 2]


def test_a_config_in_the_new_form_gets_no_older_names(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    written = exported(tmp_path, {"model_type": "llama", "rope_parameters": rope, "dtype": "float32"})
    assert not written.keys() & {"rope_theta", "rope_scaling", "torch_dtype"}
