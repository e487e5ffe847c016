"""Configs: every shipped one is read, every mistake is named with its key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from automodel_rl.config import (
    ALGORITHMS,
    MemoryConfig,
    ParallelConfig,
    ServeConfig,
    completed,
    describe_keys,
    differing_keys,
    dump_config,
    load_config,
    load_serve_config,
)
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.config.generators import TransformersGeneratorConfig
from automodel_rl.config.load import check_config
from automodel_rl.errors import InputError

SHIPPED = sorted((Path(__file__).parents[3] / "configs").glob("**/*.yaml"))

MINIMAL = """
output: out
model: {path: m}
data: {train: [{path: a.jsonl}]}
batch: {sequences: 8, microbatch_tokens: 64}
length: {steps: 3}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "sft.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_configs_are_valid(path: Path) -> None:
    (load_serve_config if path.stem == "serve" else load_config)(path)


def test_the_resolved_config_reads_back_as_itself(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal, ["--parallel.layers_per_stage", "[1, 2]", "--parallel.pp=2"])
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_config_that_a_run_writes_reads_back_as_itself(path: Path, tmp_path: Path) -> None:
    read = load_serve_config if path.stem == "serve" else load_config
    config = read(path)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert read(tmp_path / "config.yaml") == config


TEACHERS = {
    "here": {"teachers": {"large": {"path": "t", "between": "host"}}},
    "behind_a_server": {"teachers": {"large": {"path": "t", "url": "http://a:1", "api": "tinker", "name": "n"}}},
    "both": {
        "teachers": {"near": {"path": "t", "sources": ["d"]}, "far": {"path": "t", "url": "http://a:1"}},
        "data": {"train": [{"path": "d"}, {"path": "e"}]},
    },
    "divergence": {
        "teachers": {"large": {"path": "t"}},
        "distillation": {"loss": {"divergence": "jsd", "beta": 0.2}},
        "rollout": {"prompts": 4, "temperature": 0.7},
    },
}


@pytest.mark.parametrize("values", TEACHERS.values(), ids=TEACHERS)
def test_the_config_of_a_run_with_teachers_reads_back_as_itself(values: dict[str, Any], tmp_path: Path) -> None:
    config = check_config(GRPOConfig, GRPO | values)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_overrides_reach_sections_lists_and_missing_sections(minimal: Path) -> None:
    arguments = ["--optimizer.lr", "3e-6", "--data.train.0.path", "b.jsonl", "--parallel.dp-shard=2"]
    config = load_config(minimal, arguments)
    assert config.optimizer.lr == 3e-6
    assert config.data.train[0].path == "b.jsonl"
    assert config.parallel.dp_shard == 2
    assert load_config(minimal, [*arguments, "--optimizer.lr=5e-6"]).optimizer.lr == 5e-6  # the last one counts


def test_exponents_without_a_dot_are_numbers(tmp_path: Path) -> None:
    values = yaml.safe_load(MINIMAL) | {"optimizer": {"lr": "3e-6"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values).replace("'3e-6'", "3e-6"))
    assert load_config(tmp_path / "c.yaml").optimizer.lr == 3e-6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--optimizer.learning_rate", "1"], "optimizer.learning_rate: unknown key; did you mean optimizer.lr?"),
        (["--paralel.pp", "2"], "paralel: unknown key; did you mean parallel?"),
        (["--data.train.0.ignore", "[id, role]"], "ignore names role, but a message needs its role and content"),
        (["--learning_rate", "1"], "learning_rate: unknown key; did you mean optimizer.lr?"),
        (["--data.train.0.pth", "x"], "data.train.0.pth: unknown key; did you mean path?"),
        (["--optimizer.lr", "fast"], "optimizer.lr: must be a number, not 'fast'"),
        (["--parallel.pp", "0"], "parallel.pp: must be greater than 0, not 0"),
        (["--model.dtype", "fp16"], "model.dtype: must be 'bfloat16', 'float32' or 'float64', not 'fp16'"),
        (["--memory.compile", "maybe"], "memory.compile: must be 'auto' or true or false, not 'maybe'"),
        (["--batch.microbatch_tokens", "big"], "microbatch_tokens: must be 'auto' or a whole number, not 'big'"),
        (["--data.train", "[3]"], "^data.train.0: must be a section of keys and values, not 3$"),
        (["--data.train", "[]"], "data.train: must have a length of at least 1, not .."),
        (["--model.lora", "yes please"], "model.lora: must be a section of keys and values, not 'yes please'"),
        (["--length.epochs", "1"], "length: set exactly one of steps and epochs"),
        (["--parallel.dp_shard", "9"], "batch.sequences=8 must be at least 9, the number of data ranks"),
        (["--data.train.7.path", "x"], "7 is not an index of a list of 1"),
        (["--output.folder", "x"], "output is a value, not a section"),
        (["--optimizer.lr"], "--optimizer.lr has no value"),
        (["lr=3"], "unexpected argument 'lr=3'"),
    ],
)
def test_mistakes_are_named_with_key_rule_and_remedy(minimal: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_config(minimal, overrides)
    assert "\n" not in str(caught.value)


def test_a_dumped_config_that_lacks_a_key_has_its_default() -> None:
    config = check_config(GRPOConfig, GRPO)
    dumped = yaml.safe_load(dump_config(config))
    short = {**dumped, "loss": {key: value for key, value in dumped["loss"].items() if key != "kl"}}
    assert differing_keys(short, dumped) == ["loss.kl"]
    assert completed(short, config) == dumped


def test_a_required_key_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("output: x")
    with pytest.raises(
        InputError, match=r"^model .with path., data .with train., batch .*, length .*: these keys are required$"
    ):
        load_config(tmp_path / "c.yaml")


def test_all_required_keys_that_are_missing_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {dtype: float32}")
    with pytest.raises(
        InputError,
        match=r"^output, model.path, data .with train., batch .with.*length .with steps.*: these keys are required$",
    ):
        load_config(tmp_path / "c.yaml")


def sections_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], bool]]:
    """(dotted key, class, whether it must be given) of every section that is not switched on by being there."""
    for name, info in kind.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield f"{prefix}{name}", info.annotation, info.is_required()
            yield from sections_of(info.annotation, f"{prefix}{name}.")


@pytest.mark.parametrize("kind", [*ALGORITHMS.values(), ServeConfig])
def test_a_section_must_be_given_only_if_one_of_its_keys_must(kind: type[BaseModel]) -> None:
    must_be_given = {name: section for name, section, is_required in sections_of(kind) if is_required}
    assert must_be_given
    for section in must_be_given.values():
        with pytest.raises(ValidationError):
            section()


def test_grpo_needs_no_batch(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({key: GRPO[key] for key in GRPO.keys() - {"batch"}}))
    assert load_config(tmp_path / "c.yaml").batch.microbatch_tokens == "auto"


def test_a_section_with_nothing_below_has_its_defaults(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "memory:\n  # compile: false\nparallel:\n")
    config = load_config(minimal)
    assert (config.memory, config.parallel) == (MemoryConfig(), ParallelConfig())
    with pytest.raises(InputError, match=r"^model.path: this key is required$"):
        load_config(minimal, ["--model", "null"])


def test_one_value_makes_a_list_of_one_where_a_list_is_meant(minimal: Path) -> None:
    config = load_config(minimal, ["--data.train", "b.jsonl", "--data.validation", "{path: c.jsonl, ignore: id}"])
    assert [source.path for source in config.data.train] == ["b.jsonl"]
    assert [(source.path, source.ignore) for source in config.data.validation] == [("c.jsonl", ("id",))]


def test_malformed_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("output: x\nmodel: [1\n")
    with pytest.raises(InputError, match=r"c.yaml:3: not valid YAML"):
        load_config(tmp_path / "c.yaml")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"nowhere.yaml: cannot read the config file"):
        load_config("nowhere.yaml")


@pytest.mark.parametrize(
    ("values", "overrides", "message"),
    [
        ({"algorithm": ["sft"]}, [], "algorithm: \\['sft'\\] is not one of sft, dpo, kto"),
        (
            {},
            ["--output", "[a"],
            r"--output: '\[a' is not a YAML value .not valid YAML: .*: quote it if it is a string",
        ),
        ({}, ["--model", "{path: m, path: n}"], "is not a YAML value .path occurs twice, first in line 1: keep one"),
        ([1, 2], [], "a config must be a mapping of keys to values, not list"),
    ],
)
def test_odd_files_and_values_are_refused(tmp_path: Path, values: object, overrides: list[str], message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match=message):
        load_config(path, overrides)


GRPO: dict[str, Any] = {
    "algorithm": "grpo",
    "output": "run",
    "model": {"path": "m"},
    "data": {"train": [{"path": "d"}]},
    "batch": {"microbatch_tokens": 4096},
    "length": {"steps": 1},
    "optimizer": {"lr": 1e-5},
    "rewards": [{"function": "length"}],
    "rollout": {"prompts": 4},
}


@pytest.mark.parametrize(
    ("generator", "transport"),
    [
        (None, "local"),
        ("transformers", "local"),
        ({"kind": "transformers", "place": "shared"}, "ipc"),
        ({"kind": "transformers", "place": [1]}, "collective"),
    ],
)
def test_weights_go_the_way_that_fits_the_generators_place(generator: Any, transport: str) -> None:
    rollout = GRPO["rollout"] | {"generator": generator}
    generator = GRPOConfig.model_validate(GRPO | {"rollout": rollout}).rollout.generator
    assert isinstance(generator, TransformersGeneratorConfig)
    assert generator.transport == transport


OVERRIDES: list[tuple[Any, list[str], dict[str, Any]]] = [
    (None, ["--rollout.generator", "vllm"], {"kind": "vllm"}),
    ("vllm", ["--rollout.generator.sleep", "2"], {"kind": "vllm", "sleep": 2}),
    ("vllm", ["--rollout.generator.sleep", "2", "--rollout.generator", "vllm"], {"kind": "vllm", "sleep": 2}),
    (None, ["--rollout.generator.sleep", "2", "--rollout.generator", "vllm"], {"kind": "vllm", "sleep": 2}),
    ({"kind": "vllm", "python": "/p"}, ["--rollout.generator", "vllm"], {"kind": "vllm", "python": "/p"}),
    ({"kind": "vllm", "python": "/p"}, ["--rollout.generator", "transformers"], {"kind": "transformers"}),
]


@pytest.mark.parametrize(("given", "overrides", "found"), OVERRIDES, ids=str)
def test_a_generator_may_be_named_or_changed_by_overrides(
    tmp_path: Path, given: Any, overrides: list[str], found: dict[str, Any]
) -> None:
    values = {key: value for key, value in GRPO.items() if key != "algorithm"}
    values["rollout"] = GRPO["rollout"] | ({} if given is None else {"generator": given})
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(values))
    generator = load_config(tmp_path / "grpo.yaml", overrides, "grpo").rollout.generator
    assert generator.model_dump(exclude_unset=True) == found


def test_a_services_generator_may_be_changed_by_overrides(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump({"output": "o", "model": {"path": "m"}, "generator": "vllm"}))
    config = load_serve_config(tmp_path / "serve.yaml", ["--generator.memory_fraction", "0.5"])
    assert config.generator.model_dump(exclude_unset=True) == {"kind": "vllm", "memory_fraction": 0.5}


def test_an_algorithm_that_there_is_not_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL)
    with pytest.raises(InputError, match="'reinforce' is not one of sft, dpo, kto"):
        load_config(tmp_path / "c.yaml", (), "reinforce")


@pytest.mark.parametrize(
    ("generator", "rollout", "problem"),
    [
        (
            {},
            {"temperature": 0.7},
            "temperature=0.7 with generator.drafts=1: vLLM returns log-probabilities of drafted",
        ),
        ({"sleep": 2}, {}, "drafts=1 with sleep=2: the drafting layer would be dropped"),
        ({"sleep": "auto"}, {}, "drafts=1 with sleep=auto: the drafting layer would be dropped"),
    ],
)
def test_drafts_are_refused_where_they_would_be_wrong_or_lost(generator: dict, rollout: dict, problem: str) -> None:
    drafting = {"generator": {"kind": "vllm", "drafts": 1, **generator}, **rollout}
    with pytest.raises(InputError, match=problem):
        check_config(GRPOConfig, GRPO | {"rollout": GRPO["rollout"] | drafting})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"max_staleness": 1}}, "a generator in this process cannot generate while it trains"),
        (
            {"rollout": {"max_staleness": 1, "generator": {"kind": "transformers", "place": "shared"}}},
            "loss.correction.kind=none: completions from older weights need a correction",
        ),
        (
            {"weight_sync": {"checksum": True}, "rollout": {"generator": "vllm"}},
            "vLLM stores weights in other shapes than checkpoints",
        ),
        (
            {"rollout": {"generator": {"kind": "vllm", "place": [1], "sleep": 2}}},
            "rollout.generator: sleep=2 with place=.1.: the trainer uses other devices",
        ),
        (
            {"rollout": {"generator": {"kind": "vllm", "place": [1, 1]}}},
            "place=.1, 1.: each generator needs its own device: list each only once",
        ),
        (
            {"rollout": {"generator": {"kind": "transformers", "place": [1]}}, "memory": {"offload": {}}},
            "memory.offload: rollout.generator.place=.1. does not share the trainer's memory",
        ),
        (
            {
                "rollout": {"generator": {"kind": "servers", "urls": "http://localhost:1"}},
                "memory": {"offload": {}},
            },
            "memory.offload: rollout.generator.kind=servers does not share the trainer's memory",
        ),
        (
            {"rollout": {"generator": {"kind": "transformers", "sleep": 2}}},
            "rollout.generator.sleep: is a key of vllm, but this is transformers; its keys are kind, batch_size, place",
        ),
        (
            {"rollout": {"generator": {"kind": "transformers", "place": []}}},
            "rollout.generator.place: must be 'in_process' or 'shared' or must have a length of at least 1, not",
        ),
        (
            {"rollout": {"generator": {"kind": "servers"}}},
            "rollout.generator.urls: this key is required",
        ),
        (
            {"rollout": {"generator": "vlm"}},
            "rollout.generator: must be one of transformers, vllm, servers, joined, not 'vlm'; did you",
        ),
        ({"rollout": {"generator": {}}}, "must set its kind, one of transformers, vllm, servers, joined$"),
        (
            {"rollout": {"generator": {1: 2}}},
            "must set its kind, one of transformers, vllm, servers, joined, in addition to 1",
        ),
        ({"rollout": {"generator": {"knd": "vllm"}}}, "rollout.generator: knd: unknown key; did you mean kind"),
        (
            {"rollout": {"generator": True}},
            "generator: must be a name, or a section with its name as kind, not True",
        ),
        (
            {"rollout": {"generator": {"urls": [], "sleep": 2}}},
            "must set its kind, one of transformers, vllm, servers, joined",
        ),
        (
            {"rollout": {"generator": {"sleep": 2}}},
            "rollout.generator: must set its kind, such as kind: vllm, in addition to sleep",
        ),
        (
            {"memory": {"reference": "device"}},
            "memory.reference=device: this run keeps no reference policy",
        ),
        (
            {"rollout": {"generator": {"kind": "vllm", "place": [1, 2, 3], "tensor_parallel": 2}}},
            "place=.1, 2, 3.: the number of devices must be a multiple of tensor_parallel=2",
        ),
        (
            {"rollout": {"generator": {"kind": "vllm", "tensor_parallel": 2}}},
            "rollout.generator.tensor_parallel=2 does not divide the 1 ranks",
        ),
        (
            {"rollout": {"generator": {"kind": "vllm", "sleep": 2}}, "weight_sync": {"adapters": "alone"}},
            "the weights that vLLM drops are not sent again: use 1 or auto",
        ),
        (
            {
                "rollout": {"generator": {"kind": "vllm", "sleep": 1}, "max_staleness": 1},
                "loss": {"correction": {"kind": "truncate"}},
            },
            "rollout.generator.sleep with rollout.max_staleness=1: generators run while the model trains",
        ),
        (
            {
                "rollout": {"generator": {"kind": "transformers", "place": "shared"}, "max_staleness": 1},
                "loss": {"correction": {"kind": "truncate"}},
                "memory": {"offload": {}},
            },
            "memory.offload with rollout.max_staleness=1: generators run while the model trains",
        ),
    ],
)
def test_weight_sync_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    rollout = GRPO["rollout"] | changes.get("rollout", {})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(GRPO | changes | {"rollout": rollout}))
    with pytest.raises(InputError, match=message):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("sleep", "adapters", "level"),
    [("none", "merged", 0), (1, "merged", 1), ("auto", "merged", 2), ("auto", "alone", 1)],
)
def test_vllm_sleeps_as_deep_as_its_weights_allow(sleep: Any, adapters: str, level: int) -> None:
    rollout = GRPO["rollout"] | {"generator": {"kind": "vllm", "sleep": sleep}}
    config = GRPOConfig.model_validate(GRPO | {"rollout": rollout, "weight_sync": {"adapters": adapters}})
    assert config.sleep_level == level


def test_help_lists_keys_of_lists_and_of_optional_sections() -> None:
    keys = {key.name: key.default for key in describe_keys(GRPOConfig)}
    assert keys["data.train.0.path"] == "required"
    assert keys["rewards.0.time_limit"] == "10.0"
    assert keys["rewards.0.options"] == "{}"
    assert keys["model.lora.rank"] == "16"


MATH, FORMAT = {"function": "math"}, {"function": "format", "options": {"pattern": "a"}}


@pytest.mark.parametrize(
    ("rewards", "passing"),
    [
        ([FORMAT, MATH], (1, 1.0)),
        ([MATH, {"function": "exact_match"}], (0, 1.0)),
        ([FORMAT | {"passes_at": 1}, MATH], (0, 1.0)),
        ([MATH, {"function": "m:judge", "passes_at": 0.0}], (1, 0.0)),
        ([{"function": "m:judge"}, FORMAT], None),
    ],
)
def test_the_reward_that_checks_the_answer_tells_what_passes_unless_another_is_named(
    rewards: list[dict], passing: tuple[int, float] | None
) -> None:
    assert GRPOConfig.model_validate(GRPO | {"rewards": rewards}).pass_criterion == passing


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (
            [MATH | {"passes_at": 1}, FORMAT | {"passes_at": 1}],
            "math and format have passes_at, but one reward decides",
        ),
        ([MATH | {"passes_at": 2}], "passes_at=2 of math: its scores range from 0 to 1"),
        ([MATH | {"passes_at": 0}], "passes_at=0 of math: its scores range from 0 to 1"),
        ([{"function": "length", "passes_at": 1}], "passes_at=1 of length: its scores range from -inf to 0"),
    ],
)
def test_scores_that_tell_nothing_of_passing_are_refused(tmp_path: Path, rewards: list[dict], message: str) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(GRPO | {"rewards": rewards}))
    with pytest.raises(InputError, match=message):
        load_config(tmp_path / "c.yaml")


def test_metrics_have_a_name_for_every_reward() -> None:
    functions = ["format", "a:score", "b:score", "format", "a:mean", "a:format_2"]
    config = GRPOConfig.model_validate(GRPO | {"rewards": [{"function": function} for function in functions]})
    assert config.reward_names == ["format", "score", "score_2", "format_2", "mean_2", "format_2_2"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("output: x\nrewards: [math]\n", ["sft"], "is a config for grpo, not sft: run automodel-rl grpo"),
        (
            "output: x\nmodel: {path: m}\ndata: {train: d}\nbatch: {sequences: 8}\n",
            ["sft"],
            r"length \(with steps, epochs",
        ),
        ("output: x\noptimizer: {rl: 1.0e-5}\n", ["sft"], "optimizer.rl: unknown key; did you mean lr?"),
    ],
)
def test_slips_of_a_first_config_are_named(tmp_path: Path, text: str, arguments: list[str], message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_config(tmp_path / "c.yaml", algorithm=arguments[0])
