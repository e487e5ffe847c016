"""`plan`: its bytes are those of a real run, it is quick at any size, and it says what would fit."""

import json
import re
import resource
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from automodel_rl.batch import pack_microbatch
from automodel_rl.cli import main
from automodel_rl.config import ComponentsConfig, ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.algorithms import SFTConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.engine import Engine
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.hf.read import read_config
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.pipeline.timeline import simulate
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.tools.plan.command import plan
from automodel_rl.tools.plan.devices import find_device
from automodel_rl.tools.plan.encoders import plan_encoders
from automodel_rl.tools.plan.packing import PlannedPacking
from automodel_rl.tools.verify.media import with_media
from tests.audio import make_hearing_workspace
from tests.distributed.tools.test_verify import config_of
from tests.processes import run_command
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model, save_tiny_multimodal_model
from tests.vision import make_vision_workspace

ADAMW = OptimizerConfig(lr=1e-3, decay="constant")
MUON = OptimizerConfig(name="muon", decay="constant")


@dataclass(frozen=True)
class Allocated:
    pp_rank: int
    weights: int
    gradients: int
    moments: int


def allocate(model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig) -> Allocated:
    """Bytes of this rank's shards after a step."""
    handle = ModelHandle.from_pretrained(model, parallel)
    engine = Engine(handle, optimizer)
    rows = [pack_microbatch(make_sequences(2, m)) for m in range(3)]
    engine.forward_backward(rows, sft_loss)
    trained = [p for part in handle.parts for p in part.parameters() if p.grad is not None]
    gradients = sum(local_tensor(p.grad).nbytes for p in trained)
    engine.optimizer_step()
    return Allocated(
        handle.layout.pp_rank,
        sum(local_tensor(p.detach()).nbytes for part in handle.parts for p in part.parameters()),
        gradients,
        sum(local_tensor(moment).nbytes for moment in engine.optimizer.moments()),
    )


@pytest.mark.parametrize(
    ("family", "tied", "lora", "sizes", "optimizer"),
    [
        ("qwen3", False, None, {}, ADAMW),
        ("qwen3", True, None, {"pp": 2}, ADAMW),
        ("qwen3", True, {"rank": 4}, {"pp": 2}, ADAMW),
        ("qwen3", True, {"rank": 4}, {"pp": 2}, MUON),
        ("qwen3_moe", False, {"rank": 4, "targets": ["o_proj", "experts"]}, {"dp_shard": 2, "ep": 2}, MUON),
        ("qwen3", False, None, {"tp": 2, "dp_shard": 2}, ADAMW),
        ("qwen3", True, None, {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2, "cp": 2}, ADAMW),
        ("deepseek_v3", False, None, {"pp": 2, "cp": 2, "ep": 2}, ADAMW),
        ("qwen3_moe", False, None, {"cp": 2, "ep": 2}, MUON),
    ],
)
def test_bytes_are_those_of_a_run(
    ranks: RankPool,
    tmp_path: Path,
    family: str,
    tied: bool,
    lora: dict | None,
    sizes: dict,
    optimizer: OptimizerConfig,
) -> None:
    save_tiny_model(tmp_path, family, tied=tied)
    parallel = ParallelConfig(**sizes)
    model = ModelConfig(path=str(tmp_path), dtype="float32", lora=lora)
    memory_model = MemoryModel(read_config(tmp_path), model, 64, optimizer)
    planned = memory_model.plan(parallel, MemoryConfig(), 3).ranks
    runs = ranks(parallel.world_size).run(allocate, model, parallel, optimizer)
    for rank, memory in enumerate(planned):
        real = [run for run in runs if run.pp_rank == rank]
        assert max(run.weights for run in real) == memory.weights
        gradients = max(run.gradients for run in real)  # once they are reduced
        assert 2 * gradients == memory.moments if optimizer is ADAMW else gradients <= memory.moments < 2 * gradients
        assert max(run.moments for run in real) == memory.moments


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 8), (4, 8), (4, 32)])
def test_the_bubble_is_the_textbooks(schedule: str, virtual_stages: int, pp: int, num_microbatches: int) -> None:
    parallel = ParallelConfig(pp=pp, schedule=schedule, virtual_stages=virtual_stages)
    costs = [1.0] * parallel.num_stages
    timeline = simulate(parallel, num_microbatches, costs, costs)
    assert timeline.bubble == pytest.approx((pp - 1) / (num_microbatches * virtual_stages + pp - 1))


def plan_command(folder: Path, model: Path, sizes: dict, *arguments: str) -> list[str]:
    config = config_of(model, {}, dtype="bfloat16").model_dump(mode="json") | {"parallel": sizes}
    config["batch"] = {"sequences": 1024, "microbatch_tokens": 8192}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return ["plan", str(file), *arguments]


def run_plan(folder: Path, model: Path, sizes: dict, *arguments: str) -> subprocess.CompletedProcess:
    return run_command([sys.executable, "-m", "automodel_rl", *plan_command(folder, model, sizes, *arguments)])


def llama_70b(folder: Path) -> Path:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    AutoConfig.for_model("llama", **sizes, **heads).save_pretrained(folder / "llama")
    return folder / "llama"


def test_a_thousand_ranks_take_seconds(tmp_path: Path) -> None:
    AutoConfig.for_model("deepseek_v3").save_pretrained(tmp_path / "deepseek")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    cases = [
        (llama_70b(tmp_path), {"pp": 4, "tp": 8, "sequence_parallel": True}, 70.6),
        (tmp_path / "deepseek", {"pp": 16, "dp_shard": 64, "ep": 64}, 671.0),
    ]
    for model, sizes, billions in cases:
        full = ["--memory.activation_checkpointing", "full"]
        done = run_plan(tmp_path, model, sizes, "--gpus", "1024", "--json", *full)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert record["world_size"] == 1024
        assert sum(record["parameters_per_stage"]) / 1e9 == pytest.approx(billions, rel=0.01)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2 * 10


FASTEST = (
    *("--parallel.fsdp", "keep"),
    *("--memory.activation_checkpointing", "none"),
    *("--memory.offload_optimizer", "false"),
)


def test_what_is_left_open_is_decided_so_that_it_fits(tmp_path: Path) -> None:
    done = run_plan(tmp_path, llama_70b(tmp_path), {"pp": 4, "dp_shard": 8}, "--device", "H100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parallel.fsdp=reshard: each layer is gathered when it computes" in done.stdout
    assert "memory.activation_checkpointing=full, offload_optimizer=true" in done.stdout


def test_what_does_not_fit_names_layouts_that_do(tmp_path: Path) -> None:
    done = run_plan(tmp_path, llama_70b(tmp_path), {"pp": 4, "dp_shard": 8}, "--gpus", "32", *FASTEST)
    assert done.returncode == 1
    assert "verdict: does not fit" in done.stderr
    assert done.stdout.count("would fit: ") >= 1, done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "7"], "--gpus 7: must be a multiple of parallel.pp x tp x cp x dp_replicate = 2"),
        (["--gpus", "many"], "--gpus many: must be a whole number"),
        (["--device", "H300"], "--device H300: did you mean H200? known devices are A10, A100"),
        (["--parallel.tp", "3"], "parallel.tp=3 must divide the 64 attention heads"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(plan_command(tmp_path, llama_70b(tmp_path), {"pp": 2}, *arguments)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def allocate_encoder(model: ModelConfig, components: ComponentsConfig) -> tuple[int, int, int]:
    """Bytes of this rank's shards of the encoder, of their moments, and of its whole weights."""
    handle = ModelHandle.from_pretrained(model, components=components)
    engine = Engine(handle, ADAMW)
    sequence = with_media(make_sequences(1, 0)[0], handle.whole_config, seed=1)
    engine.train_step([] if handle.layout.is_outsider else [pack_microbatch([sequence])], sft_loss)
    (part,) = next((module.parts for module in handle.components if module.name != "language"), [None])
    if part is None:
        return 0, 0, 0
    weights = [local_tensor(parameter) for parameter in part.parameters()]
    moments = [local_tensor(moment) for moment in engine.optimizer.moments()]  # this rank has nothing else
    return sum(t.nbytes for t in weights), sum(t.nbytes for t in moments), sum(p.numel() for p in part.parameters())


@pytest.mark.parametrize(
    ("family", "name", "encoder", "frozen"),
    [
        ("qwen2_5_vl", "vision", {"ranks": "0-1", "dp_shard": 2}, ()),
        ("llava", "vision", {"ranks": "0-1", "tp": 2}, ("vision",)),
        ("qwen3_vl", "vision", {"ranks": "0-1", "tp": 2}, ()),
        ("qwen2_audio", "audio", {"ranks": "0-1", "dp_shard": 2}, ()),
    ],
)
def test_bytes_of_an_encoder_are_those_of_a_run(
    ranks: RankPool, tmp_path: Path, family: str, name: str, encoder: dict, frozen: tuple
) -> None:
    save_tiny_multimodal_model(tmp_path, family)
    components = ComponentsConfig.model_validate({name: encoder, "language": {"ranks": 2}})
    model = ModelConfig(path=str(tmp_path), dtype="float32", frozen=frozen)
    packing = PlannedPacking(1, None, {name: 100})
    planned = plan_encoders(read_config(tmp_path), model, MemoryConfig(), components, packing, ADAMW)[name]
    real = ranks(3).run(allocate_encoder, model, components)
    assert max(weights for weights, _, _ in real) == planned.weights
    # An encoder's last layer may take no part, and has no moments then.
    assert 0.5 * planned.moments < max(moments for _, moments, _ in real) <= planned.moments
    assert max(parameters for _, _, parameters in real) == planned.parameters


def test_a_plan_counts_every_encoder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_hearing_workspace(tmp_path, "qwen2_5_omni_thinker", num_chats=4)
    config = config_of(tmp_path / "model", {}).model_dump()
    data = {"train": [{"path": str(tmp_path / "train.jsonl")}]}
    capsys.readouterr()  # what transformers says when it saves
    plan(SFTConfig.model_validate({**config, "data": data}), None, find_device("H200"), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert all(found["encoders"][name]["activations"] > 0 for name in ("vision", "audio"))
    assert found["peak_bytes"] > sum(encoder["peak"] for encoder in found["encoders"].values())


def test_a_plan_of_two_modules_counts_both(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_vision_workspace(tmp_path, "qwen2_5_vl")
    config = config_of(tmp_path / "model", {})
    capsys.readouterr()  # what transformers says when it saves
    plan(config, None, find_device("H200"), as_json=False)
    assert "media unknown: no data to measure" in capsys.readouterr().out
    with_data = config.model_dump() | {"data": {"train": [{"path": str(tmp_path / "train.jsonl")}]}}
    plan(SFTConfig.model_validate(with_data), None, find_device("H200"), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["encoders"]["vision"]["activations"] > 0
    assert found["peak_bytes"] > found["encoders"]["vision"]["peak"] > 0


def test_other_layouts_are_shown_fastest_first_and_in_seconds(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_plan(
        tmp_path, llama_70b(tmp_path), {"pp": 4, "dp_shard": 8}, "--gpus", "32", "--device", "h100", *FASTEST
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20  # of which imports take half
    shown = [line for line in done.stdout.splitlines() if line.startswith("would fit: ")]
    assert len(shown) == 3, done.stdout
    rates = [int(re.search(r"([\d,]+) tokens/s", line)[1].replace(",", "")) for line in shown]
    assert rates == sorted(rates, reverse=True)
    overrides = shlex.split(shown[0].removeprefix("would fit: ").partition("  (")[0])
    again = run_plan(tmp_path, tmp_path / "llama", {"pp": 4, "dp_shard": 8}, "--device", "H100", *FASTEST, *overrides)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "verdict: fits" in again.stdout


def test_a_folder_with_its_config_alone_is_planned_beside_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoConfig.for_model("qwen3", hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path / "model")
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["config.json"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    command = plan_command(tmp_path, tmp_path / "model", {}, "--data.train", str(tmp_path / "chats.jsonl"))
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "packing efficiency unknown: model.path has no tokenizer to measure the data with" in said
    assert "1024 microbatches a step" in said


@pytest.mark.longer
def test_more_gpus_are_proposed_where_none_of_the_layouts_fits(tmp_path: Path) -> None:
    done = run_plan(tmp_path, llama_70b(tmp_path), {"pp": 4}, "--device-gib", "60")
    assert done.returncode == 1
    assert "4 ranks of 60 GiB" in done.stdout
    assert re.search(r"^would fit on (16|32|64) GPUs: --parallel", done.stdout, re.MULTILINE), done.stdout
    done = run_plan(tmp_path, tmp_path / "llama", {"pp": 4}, "--device-gib", "4")
    assert "nothing found: no layout that was tried fits on up to 64 GPUs" in done.stdout


@pytest.mark.longer
def test_a_mixture_of_671b_parameters_fits_on_128_gpus_by_its_experts(tmp_path: Path) -> None:
    AutoConfig.for_model("deepseek_v3").save_pretrained(tmp_path / "model")
    done = run_plan(tmp_path, tmp_path / "model", {}, "--gpus", "128", "--device", "H200")
    assert done.returncode == 1
    assert re.search(r"^would fit: .*--parallel.ep ", done.stdout, re.MULTILINE), done.stdout


def test_a_layout_that_wastes_time_is_told_of_a_faster_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "vocab_size": 32_000}
    AutoConfig.for_model("llama", **sizes, num_attention_heads=16).save_pretrained(tmp_path / "small")
    slow = run_plan(tmp_path, tmp_path / "small", {"tp": 8}, "--memory.activation_checkpointing", "full")
    assert "faster by the estimate: " in slow.stdout
    assert "--parallel.dp_shard 8 --parallel.tp 1" in slow.stdout
    good = run_plan(tmp_path, tmp_path / "small", {"dp_shard": 8})
    assert "faster by the estimate: " not in good.stdout
    record = json.loads(run_plan(tmp_path, tmp_path / "small", {"dp_shard": 8}, "--json").stdout)
    assert record["tokens_per_second"] == pytest.approx(1024 * 8192 / record["seconds"])


@pytest.mark.parametrize(
    ("length", "changes", "measured"),
    [(8192, {}, 43_091), (65_536, {"activation_checkpointing": "selective"}, 17_092)],
)
def test_estimates_are_near_what_was_measured(tmp_path: Path, length: int, changes: dict, measured: int) -> None:
    """A dense model of 1.5B on one H200, with a sequence in each microbatch (benchmarks/speed.md)."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 32_768}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    AutoConfig.for_model("qwen3", **sizes, **heads).save_pretrained(tmp_path / "dense")
    options = [f"--memory.{key}={value}" for key, value in changes.items()]
    options += [f"--batch.microbatch_tokens={length}"]
    record = json.loads(run_plan(tmp_path, tmp_path / "dense", {}, "--json", *options).stdout)
    assert record["tokens_per_second"] == pytest.approx(measured, rel=0.15)
