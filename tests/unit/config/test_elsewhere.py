"""Keys of other trainers are answered with those here, wherever they are given."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from automodel_rl.cli import main
from automodel_rl.config import ALGORITHMS, ServeConfig, describe_keys, equivalents, load_config
from automodel_rl.config.load import check_config, parse_overrides
from automodel_rl.errors import InputError

CONFIGS: dict[str, dict[str, Any]] = {
    "sft": {"batch": {"sequences": 8}},
    "dpo": {"batch": {"pairs": 8}},
    "grpo": {"rollout": {"prompts": 8}, "rewards": ["math"]},
}

FILES = {
    "sft": ("trl/trainer/sft_config.py", "trl/trainer/base_config.py", "transformers/training_args.py"),
    "dpo": ("trl/trainer/dpo_config.py",),
    "grpo": ("trl/trainer/grpo_config.py",),
}
"""Files with the classes whose fields people set, by the algorithm that they belong to."""


def settings(algorithm: str) -> dict[str, Any]:
    common = {"output": "out", "model": {"path": "m"}, "data": {"train": "a.jsonl"}, "length": {"steps": 3}}
    return {"algorithm": algorithm, **common, **CONFIGS[algorithm]}


def fields_of(file: str) -> list[str]:
    """Names of the fields of a file's classes, without an import, which takes seconds."""
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    classes = [n for n in ast.parse((Path(spec.origin).parent / rest).read_text()).body if isinstance(n, ast.ClassDef)]
    annotated = [node.target for cls in classes for node in cls.body if isinstance(node, ast.AnnAssign)]
    return [target.id for target in annotated if isinstance(target, ast.Name) and not target.id.startswith("_")]


def message(algorithm: str, changes: dict[str, Any]) -> str:
    try:
        check_config(ALGORITHMS[algorithm], settings(algorithm) | changes)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("algorithm", "file"), [(name, file) for name, files in FILES.items() for file in files])
def test_every_argument_of_trl_and_transformers_is_answered(algorithm: str, file: str) -> None:
    fields = fields_of(file)
    assert len(fields) > 3
    said = {field: message(algorithm, {field: "x"}) for field in fields if field != "seed"}
    unanswered = [
        f
        for f, text in said.items()
        if "did you mean" not in text
        and "does not have this setting" not in text
        and "no equivalent setting" not in text
    ]
    assert not unanswered


@pytest.mark.parametrize(
    ("algorithm", "overrides", "said"),
    [
        ("grpo", "--num_generations 8", "num_generations: unknown key; did you mean rollout.group_size?"),
        ("grpo", "--num-generations=8", "num_generations: unknown key; did you mean rollout.group_size?"),
        ("grpo", "--beta 0.1", "beta: unknown key; did you mean loss.kl.coefficient?"),
        ("dpo", "--beta 0.1", "beta: unknown key; did you mean loss.beta?"),
        (
            "sft",
            "--beta 0.1",
            "beta: unknown key; sft does not have this setting; in other algorithms it is loss.beta or",
        ),
        ("sft", "--save_steps 5", "save_steps: unknown key; did you mean checkpoint.every_steps?"),
        ("sft", "--max_steps 5", "max_steps: unknown key; did you mean length.steps?"),
        ("sft", "--length.max_steps 5", "length.max_steps: unknown key; did you mean length.steps?"),
        ("sft", "--bf16 true", "bf16: unknown key; did you mean model.dtype? (bfloat16 or float32"),
        ("sft", "--bf16", "--bf16 has no value: did you mean model.dtype?"),
        ("sft", "--bf16 --seed 3", "--bf16 has no value: did you mean model.dtype?"),
        (
            "sft",
            "--per_device_train_batch_size 2",
            "did you mean batch.sequences? (the global batch: per_device_train_batch_size x gradient_accumulation",
        ),
        ("dpo", "--per_device_train_batch_size 2", "did you mean batch.pairs? (the global batch"),
        ("sft", "--optimizer.learning_rate 1", "optimizer.learning_rate: unknown key; did you mean optimizer.lr?"),
        ("sft", "--warmup_steps 1", "warmup_steps: unknown key; did you mean optimizer.warmup_steps?"),
        ("sft", "--optimizer adamw_torch", "'adamw_torch'; did you mean optimizer.name? (adamw, adamw_8bit or muon)"),
        ("sft", "--logging_steps 1", "no equivalent setting: every step is printed"),
        ("sft", "--load_in_8bit true", "no equivalent setting: adapters may have a base in nf4"),
        ("grpo", "--policy.train_global_batch_size 8", "did you mean rollout.prompts? (the global batch"),
        ("grpo", "--grpo.num_generations_per_prompt 8", "did you mean rollout.group_size?"),
        (
            "grpo",
            "--policy.optimizer.kwargs.lr 1",
            "policy.optimizer.kwargs.lr: unknown key; did you mean optimizer.lr?",
        ),
        ("grpo", "--algorithm.adv_estimator grpo", "--algorithm.adv_estimator: did you mean advantage.kind?"),
        ("grpo", "--actor_rollout_ref.rollout.n 8", "did you mean rollout.group_size?"),
        ("grpo", "--data.max_response_length 8", "did you mean rollout.max_new_tokens?"),
        ("sft", "--lora_r 8", "did you mean model.lora.rank?"),
        ("sft", "--model.lora_r 8", "did you mean model.lora.rank?"),
        ("sft", "--cutoff_len 8", "did you mean data.max_tokens?"),
        ("sft", "--sample_packing true", "no equivalent setting: sequences are always packed"),
    ],
)
def test_keys_of_other_trainers_are_answered(tmp_path: Path, algorithm: str, overrides: str, said: str) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings(algorithm)))
    with pytest.raises(InputError) as caught:
        load_config(tmp_path / "c.yaml", overrides.split())
    assert said in str(caught.value)


def test_sections_of_other_trainers_are_answered_key_by_key() -> None:
    policy = {"model_name": "m", "dtensor_cfg": {"tensor_parallel_size": 2}, "nowhere": 1}
    said = message("grpo", {"policy": policy, "grpo": {"max_num_steps": 3}})
    assert said == (
        "policy.model_name: unknown key; did you mean model.path? (a folder or a hub id); "
        "policy.dtensor_cfg.tensor_parallel_size: unknown key; did you mean parallel.tp?; "
        "grpo.max_num_steps: unknown key; did you mean length.steps? (in place of length.epochs)"
    )
    many = {f"policy_{number}": {"train_global_batch_size": 1} for number in range(3)}
    assert message("grpo", {"trainers": many}).count("did you mean") == 3


def test_a_whole_config_of_another_trainer_is_one_line_of_bearable_length() -> None:
    names = [name for row in equivalents.rows() for name in row.nemo_rl if name.startswith("policy.")]
    policy = {name.removeprefix("policy."): 1 for name in names}
    said = message("grpo", {"policy": policy})
    assert said.count("unknown key") == equivalents.MAX_SHOWN
    assert f"and {len(names) - equivalents.MAX_SHOWN} more keys, listed in configs/README.md" in said


def test_a_section_named_algorithm_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {key: value for key, value in settings("grpo").items() if key != "algorithm"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values | {"algorithm": {"adv_estimator": "grpo"}}))
    assert main(["grpo", str(tmp_path / "c.yaml")]) == 2
    assert "algorithm.adv_estimator: unknown key; did you mean advantage.kind?" in capsys.readouterr().err


def test_slips_of_our_own_keys_stay_slips() -> None:
    assert "did you mean optimizer?" in message("sft", {"optimizr": {"lr": 1}}) + message("sft", {"optimizr": 1})
    assert parse_overrides(["--output=--odd"]) == [("output", "--odd")]


def test_what_the_tables_name_exists() -> None:
    keys = {key.name for kind in (*ALGORITHMS.values(), ServeConfig) for key in describe_keys(kind)}
    sections = {key[:end] for key in keys for end in range(len(key)) if key[end] == "."}
    assert {key for row in equivalents.rows() for key in row.here} <= keys | sections


def test_every_name_of_the_tables_has_one_meaning_and_every_missing_setting_its_reason() -> None:
    names = [name for row in equivalents.rows() for name in row.names]
    assert len(names) == len({*names})
    assert all(row.note for row in equivalents.rows() if not row.here)
