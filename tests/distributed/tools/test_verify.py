"""`verify` says that layouts are equal to one process, and that they are not when a bug is planted."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from automodel_rl.config import ParallelConfig
from automodel_rl.config.algorithms import SFTConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.errors import VerificationError
from automodel_rl.support.model_rules import BY_LENGTH
from automodel_rl.tools.verify.command import verify
from automodel_rl.tools.verify.comparison import Case, Differences, compare
from automodel_rl.tools.verify.layout import MAX_RANKS, layout_to_verify
from tests.faults import planted
from tests.processes import run_command
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model, save_tiny_multimodal_model


def config_of(folder: Path, sizes: dict, dtype: str = "float32") -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "output": "never",
            "model": {"path": str(folder), "dtype": dtype},
            "data": {"train": [{"path": "none.jsonl"}]},
            "batch": {"sequences": 8, "microbatch_tokens": 64},
            "length": {"steps": 1},
            "parallel": sizes,
        }
    )


def verdict(config: SFTConfig, fault: str | None) -> str:
    try:
        with planted(fault):
            verify(config, as_json=False)
    except VerificationError as error:
        return str(error)
    return "equal"


INTERLEAVED = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
SHOWS_IN = {
    "documents see each other": ("log-probabilities", None),
    "tied gradient counted once": ("gradient of embed_tokens.weight", "log-probabilities"),
    "mean over data ranks": ("gradient of self_attn.q_proj.weight", "log-probabilities"),
    "mean over cp": ("gradient of self_attn.q_proj.weight", "log-probabilities"),
    "local token counts": ("loss", "gradient of"),
    "norm of one stage": ("gradient norm", "gradient of"),
    "expert gradients scaled twice": ("gradient of mlp.experts", "gradient of embed_tokens"),
    "reference swap of one part": ("reference log-probabilities", "gradient"),
    "partial gradients of tp left alone": ("norm.weight", "gradient of embed_tokens"),
    "routes shifted by a token": ("choices of experts", None),
    "routes of other layers": ("choices of experts", None),
}
"""For every fault, what the first step shows to be different, and what not."""


def found_with(fault: str, parallel: ParallelConfig, folder: Path) -> Differences:
    with planted(fault):
        return compare(Case(parallel, microbatches=(3, 2), replay="routes" in fault), folder, folder)


@pytest.mark.parametrize(
    ("fault", "family", "sizes"),
    [
        ("documents see each other", "qwen3", {}),
        ("documents see each other", "qwen3", {"pp": 2}),
        ("documents see each other", "mistral", {"cp": 2}),
        ("tied gradient counted once", "qwen3", {"pp": 2}),
        ("mean over data ranks", "qwen3", {"pp": 2, "dp_shard": 2}),
        ("mean over cp", "qwen3", {"cp": 2}),
        ("local token counts", "qwen3", {"pp": 2, "dp_shard": 2}),
        ("norm of one stage", "qwen3", {"pp": 2}),
        ("expert gradients scaled twice", "qwen3_moe", {"cp": 2, "ep": 2}),
        ("reference swap of one part", "qwen3", INTERLEAVED),
        ("partial gradients of tp left alone", "qwen3", {"tp": 2}),
        ("partial gradients of tp left alone", "llama", {"tp": 2, "sequence_parallel": True}),
        ("routes shifted by a token", "qwen3_moe", {}),
        ("routes of other layers", "qwen3_moe", {"pp": 2}),
    ],
)
def test_planted_bugs_show_where_they_strike(
    ranks: RankPool, tmp_path: Path, fault: str, family: str, sizes: dict
) -> None:
    save_tiny_model(tmp_path, family, tied="tied" in fault)
    parallel = ParallelConfig(**sizes)
    found = ranks(parallel.world_size).run(found_with, fault, parallel, tmp_path)[0]
    different = {kind for kind, difference in {**found.all, **found.first}.items() if difference > 1e-9}
    shown, equal = SHOWS_IN[fault]
    assert any(shown in kind for kind in different), different
    assert equal is None or not any(equal in kind for kind in different), different


ENCODERS = {"vision": {"ranks": "0-1", "dp_shard": 2}, "language": {"ranks": 2}}
READERS = {"vision": {"ranks": 0}, "language": {"ranks": "1-2", "dp_shard": 2}}


def found_in_modules(fault: str, components: dict, folder: Path) -> Differences:
    with planted(fault):
        return compare(
            Case(microbatches=(3, 2), components=ComponentsConfig.model_validate(components)), folder, folder
        )


@pytest.mark.parametrize(
    ("fault", "components", "shown", "equal"),
    [
        ("mean over encoder ranks", ENCODERS, "gradient of vision_tower", "gradient of embed_tokens"),
        ("mean over ranks of the language model", READERS, "gradient of embed_tokens", "gradient of vision_tower"),
        ("clipping by module", READERS, "weights", "gradient of"),
        ("embeddings off by one", READERS, "log-probabilities", None),
    ],
)
def test_planted_bugs_of_modules_show_where_they_strike(
    ranks: RankPool, tmp_path: Path, fault: str, components: dict, shown: str, equal: str | None
) -> None:
    save_tiny_multimodal_model(tmp_path, num_layers=2)
    found = ranks(3).run(found_in_modules, fault, components, tmp_path)[0]
    different = {kind for kind, difference in {**found.all, **found.first}.items() if difference > 1e-9}
    assert any(shown in kind for kind in different), different
    assert equal is None or not any(equal in kind for kind in different), different


def verdict_of_modules(folder: Path, fault: str | None) -> str:
    values = config_of(folder, {}).model_dump()
    del values["parallel"]
    return verdict(SFTConfig.model_validate({**values, "components": READERS}), fault)


@pytest.mark.parametrize(("fault", "text"), [(None, "equal"), ("clipping by module", "verdict: DIFFERENT")])
def test_modules_of_a_config_get_a_verdict(ranks: RankPool, tmp_path: Path, fault: str | None, text: str) -> None:
    save_tiny_multimodal_model(tmp_path, "qwen2_5_vl", num_layers=2)
    assert all(found.startswith(text) for found in ranks(3).run(verdict_of_modules, tmp_path, fault))


def test_a_config_with_an_encoder_of_audio_gets_a_verdict(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path, "qwen2_audio", num_layers=2)
    assert all(found.startswith("equal") for found in ranks(2).run(verdict, config_of(tmp_path, {"pp": 2}), None))


def test_a_planted_bug_turns_the_verdict(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    for text in ranks(2).run(verdict, config_of(tmp_path, {"dp_shard": 2}), "mean over data ranks"):
        assert text.startswith("verdict: DIFFERENT from one process in "), text
        assert "gradient of embed_tokens.weight, gradient of self_attn.q_proj.weight" in text


SCALED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.mark.parametrize("rope_type", SCALED)
def test_sequences_are_on_both_sides_of_where_rotary_embeddings_are_scaled(
    ranks: RankPool, tmp_path: Path, rope_type: str
) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **SCALED[rope_type]}
    save_tiny_model(tmp_path, "llama", num_layers=2, max_position_embeddings=4096, rope_parameters=rope)
    text = ranks(1).run(verdict, config_of(tmp_path, {}), "rotary embeddings by the longest sequence")[0]
    refused = rope_type in BY_LENGTH  # for a packed row's sequences would have the frequencies of the longest
    assert text.startswith("verdict: DIFFERENT from one process in log-probabilities" if refused else "equal"), text


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("gemma2", {"pp": 2}), ("deepseek_v3", {"cp": 2, "ep": 2}), ("qwen3", {"tp": 2, "dp_shard": 2})],
)
def test_sound_layouts_are_equal(ranks: RankPool, tmp_path: Path, family: str, sizes: dict) -> None:
    save_tiny_model(tmp_path, family)
    config = config_of(tmp_path, sizes)
    assert set(ranks(config.parallel.world_size).run(verdict, config, None)) == {"equal"}


def run_verify(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "automodel_rl", "verify", *map(str, arguments)]
    return run_command(command)


def printed(config: SFTConfig) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        verify(config, as_json=False)
    return text.getvalue()


def test_what_is_left_out_is_said(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    values = config_of(tmp_path, {"pp": 2}).model_dump()
    values["memory"] = {"activation_checkpointing": "full", "compile": True}
    values["model"] |= {"attention": "varlen", "dtype": "bfloat16", "lora": {}}
    *_, left_out, verdict_line = ranks(2).run(printed, SFTConfig.model_validate(values))[0].splitlines()
    assert verdict_line == "verdict: equal to one process"
    assert left_out.startswith("not compared: ")
    for what in ("model.dtype=bfloat16", "model.attention=varlen", "memory.compile", "model.lora"):
        assert what in left_out


def test_the_command_starts_ranks_and_reports(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config_of(tmp_path, {"pp": 2}).model_dump(mode="json")))
    done = run_verify(file, "--optimizer.name", "muon", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["equal"] is True
    assert record["optimizer"] == "muon"
    assert record["not_compared"] == ["weights of the checkpoint", "model.dtype=float32"]
    assert {"loss", "gradient of self_attn.q_proj.weight", "exported tensors"} <= record["differences"].keys()


def test_a_family_that_is_not_in_the_table_is_tried_with_the_facts_of_one_that_is(tmp_path: Path) -> None:
    AutoConfig.for_model("bitnet", num_hidden_layers=2).save_pretrained(tmp_path)
    done = run_verify("--config", tmp_path, "--family-like", "llama", "--parallel.cp", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("verdict: equal to one process\n")
    for arguments, message in (
        (
            ("--config", tmp_path, "--family-like", "lama"),
            "--family-like lama: is not in the table: did you mean llama?",
        ),
        (("--config", tmp_path), "a 'bitnet' model with implementation transformers is not supported"),
    ):
        done = run_verify(*arguments)
        assert done.returncode == 2
        assert message in done.stderr


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config_of(tmp_path, {}).model_dump(mode="json")))
    done = run_verify(file, "--parallel.ep", "2")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "parallel.ep=2: a 'qwen3' model has no experts: use ep=1" in done.stderr


def test_many_data_ranks_shrink_to_what_shows_the_same() -> None:
    small = layout_to_verify(ParallelConfig(pp=2, cp=2, dp_shard=64, dp_replicate=4, ep=4))
    assert small.world_size <= MAX_RANKS
    assert (small.pp, small.cp, small.ep) == (2, 2, 4)
    assert small.dp_shard > 1
