"""Adapters against PEFT on plain transformers, in float64."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.hf.find import ModelFiles
from automodel_rl.hf.read import Checkpoint, read_config
from automodel_rl.lora.layers import adapted_layers, is_adapter
from automodel_rl.lora.magnitude import MAGNITUDE
from automodel_rl.lora.peft import AdapterFolder
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.optimizers import OPTIMIZERS
from automodel_rl.tools.export import merged_tensors
from automodel_rl.tools.verify.one_process import OneProcess, Training
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

STEPS = 3


def sequences_of(step: int, data_rank: int, microbatch: int) -> list:
    return make_sequences(1 + (microbatch + data_rank) % 3, 100 * step + 10 * data_rank + microbatch)


def train(folder: Path, parallel: ParallelConfig, optimizer: OptimizerName, lora: LoraConfig) -> list[float]:
    """Trains adapters and writes them before and after; the losses."""
    model = ModelConfig(path=str(folder), dtype="float64", lora=lora)
    handle = ModelHandle.from_pretrained(model, parallel)
    engine = Engine(handle, OptimizerConfig(name=optimizer, lr=1e-2, max_grad_norm=0.5, decay="constant"))
    handle.save_pretrained(folder / "initial")
    losses = []
    for step in range(STEPS):
        microbatches = [
            pack_microbatch(sequences_of(step, handle.layout.data_rank, microbatch)) for microbatch in range(3)
        ]
        losses.append(engine.train_step(microbatches, sft_loss).loss)
    handle.save_pretrained(folder / "trained")
    return losses


def hf_tensors_of_trained(folder: Path, parallel: ParallelConfig, lora: LoraConfig) -> dict[str, Tensor]:
    """The whole model with lively adapters, which are also written."""
    save_lively_adapters(folder, lora, parallel)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder / "adapters"), dtype="float64"), parallel)
    return {name: tensor.clone() for name, tensor in handle.named_hf_tensors()}


DORA = ("q_proj", "o_proj")
"""Targets whose rows have trained lengths."""


@pytest.mark.parametrize(
    ("family", "sizes", "targets"),
    [
        ("qwen3_moe", {"dp_shard": 2, "ep": 2}, ("q_proj", "experts")),
        ("gpt_oss", {"dp_shard": 2, "ep": 2}, ("q_proj", "experts")),
        ("qwen3", {"tp": 2}, ("q_proj", "o_proj", "down_proj")),
        ("llama", {"tp": 2, "dp_shard": 2}, ("q_proj", "o_proj", "up_proj")),
        ("llama", {"dp_shard": 3}, DORA),
    ],
)
def test_adapters_are_merged_on_every_rank_as_in_files(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, targets: tuple[str, ...]
) -> None:
    save_tiny_model(tmp_path, family)
    lora = LoraConfig(rank=4, alpha=8.0, targets=targets, dora=targets == DORA)
    parallel = ParallelConfig(**sizes)
    own = ranks(parallel.world_size).run(hf_tensors_of_trained, tmp_path, parallel, lora)
    adapters = AdapterFolder(tmp_path / "adapters", merges=True)
    files = ModelFiles(tmp_path, str(tmp_path), adapters)
    merged = merged_tensors(
        Checkpoint(files, read_config(tmp_path)), adapters.tensors, adapters.config.scale, torch.float64
    )
    for name, tensor in merged:
        for of_rank in own:
            torch.testing.assert_close(of_rank[name], tensor, rtol=0, atol=1e-12, msg=name)


def train_with_peft(
    folder: Path, base: Path, data_ranks: int, optimizer: OptimizerName
) -> tuple[list[float], dict[str, Tensor], OneProcess]:
    """Trains the adapters of `folder / "initial"` on the model `base`; the losses, what is trained, and the model."""
    reference = OneProcess(base, torch.float64, Training(lr=1e-2, optimizer=optimizer), torch.device("cpu"))
    reference.model = PeftModel.from_pretrained(reference.model, folder / "initial", is_trainable=True)
    reference.optimizers = OPTIMIZERS[optimizer].reference(
        reference.model, reference.training.config, reference.run_examples
    )
    losses = []
    for step in range(STEPS):
        everyone = [
            s for rank in range(data_ranks) for microbatch in range(3) for s in sequences_of(step, rank, microbatch)
        ]
        losses.append(reference.backward([everyone]))
        reference.step()
    named = reference.model.named_parameters()
    trained = {n.replace(".default", ""): p.detach() for n, p in named if p.requires_grad}
    return losses, {n.replace(f"{MAGNITUDE}.weight", MAGNITUDE): p for n, p in trained.items()}, reference


DENSE_LAYERS = {"mlp_only_layers": [0, 2]}
"""A mixture in which some layers have no experts."""

LAYERS = LoraConfig(rank=4, alpha=8.0)
EXPERTS = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "experts"))
LENGTHS = LoraConfig(rank=4, alpha=8.0, dora=True)
DOWN_OF_EXPERTS = LoraConfig(rank=2, targets=("experts.down_proj",))


@pytest.mark.parametrize(
    ("family", "model", "sizes", "optimizer", "lora"),
    [
        ("qwen3", {}, {}, "adamw", LAYERS),
        ("qwen3", {}, {"pp": 2}, "adamw", LAYERS),
        ("qwen3", {}, {"cp": 2}, "adamw", LAYERS),
        ("qwen3", {}, {"cp": 2}, "muon", LAYERS),
        ("llama", {}, {"pp": 2, "dp_shard": 2, "fsdp": "reshard"}, "adamw", LAYERS),
        ("qwen3", {}, {}, "adamw", LENGTHS),
        ("qwen2", {}, {"dp_shard": 3, "fsdp": "reshard"}, "adamw", LENGTHS),
        ("qwen3", {}, {"pp": 2, "cp": 2}, "adamw", LENGTHS),
        ("qwen3_moe", {}, {"dp_shard": 2, "ep": 2}, "muon", LENGTHS),
        ("qwen3", {}, {"tp": 2}, "adamw", LAYERS),
        ("qwen3", {}, {"tp": 2}, "muon", LAYERS),
        ("llama", {}, {"tp": 2, "pp": 2, "sequence_parallel": True}, "adamw", LAYERS),
        ("qwen2", {}, {"tp": 2, "dp_shard": 2, "fsdp": "reshard"}, "adamw", LAYERS),
        ("qwen3_moe", {}, {"tp": 2, "cp": 2, "ep": 2, "sequence_parallel": True}, "adamw", LAYERS),
        ("qwen3_moe", {}, {"tp": 2, "ep": 2, "sequence_parallel": True}, "adamw", EXPERTS),
        ("qwen3_moe", {}, {"tp": 2}, "adamw", EXPERTS),
        ("qwen3_moe", {}, {"cp": 2, "ep": 2}, "adamw", LAYERS),
        ("qwen3_moe", DENSE_LAYERS, {"pp": 2}, "adamw", LAYERS),
        ("qwen3_moe", {}, {"pp": 2, "dp_shard": 2, "ep": 2, "fsdp": "reduce"}, "adamw", EXPERTS),
        ("gpt_oss", {}, {"dp_shard": 2, "ep": 2, "fsdp": "reshard"}, "adamw", EXPERTS),
        ("gpt_oss", {}, {"dp_shard": 2}, "adamw", DOWN_OF_EXPERTS),
        ("mixtral", {}, {"cp": 2, "dp_shard": 2, "ep": 2}, "adamw", EXPERTS),
    ],
)
def test_training_and_files_are_those_of_peft(
    ranks: RankPool, tmp_path: Path, family: str, model: dict, sizes: dict, optimizer: OptimizerName, lora: LoraConfig
) -> None:
    save_tiny_model(tmp_path, family, **model)
    parallel = ParallelConfig(**sizes)
    losses = ranks(parallel.world_size).run(train, tmp_path, parallel, optimizer, lora)[0]
    expected_losses, expected, _ = train_with_peft(tmp_path, tmp_path, parallel.num_data_ranks, optimizer)
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    saved = load_file(tmp_path / "trained" / "adapter_model.safetensors")
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-8)


def save_lively_adapters(folder: Path, lora: LoraConfig, parallel: ParallelConfig | None = None) -> list[Tensor]:
    """Writes adapters that change what the model computes; its log-probabilities."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", lora=lora), parallel)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in handle.named_parameters():
        if is_adapter(name):
            nn.init.normal_(parameter, std=0.1, generator=generator)
    handle.save_pretrained(folder / "adapters")
    return engine.logprobs([pack_microbatch(make_sequences(3, seed=0))])


@torch.no_grad()
def logprobs_with_peft(folder: Path, adapters: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Of the same sequences, before and after peft has read the adapters; whatever it warns of is an error."""
    reference = OneProcess(folder, torch.float64, Training(lr=1e-2), torch.device("cpu"))
    sequences = make_sequences(3, seed=0)
    before = [reference.logprobs(sequence) for sequence in sequences]
    with warnings.catch_warnings(action="error"):
        reference.model = PeftModel.from_pretrained(reference.model, adapters)
    return before, [reference.logprobs(sequence) for sequence in sequences]


DOWN_ALONE = LoraConfig(targets=("down_proj",))
MIXTURES = ("qwen3_moe", "gpt_oss", "granitemoe")
"""Experts one by one in files, stacked and transposed, and stacked under other names."""


NAMED = [family for family in TEXT_FAMILIES if family != "laguna"]
"""Families whose adapters PEFT opens. Of Laguna's shared experts it does not find those that it has written itself."""


@pytest.mark.parametrize(
    ("family", "sizes", "lora"),
    [
        *((family, {}, LoraConfig()) for family in NAMED),
        ("qwen3_moe", DENSE_LAYERS, LoraConfig()),
        ("qwen3_moe", DENSE_LAYERS, DOWN_ALONE),
        ("qwen2", {}, LENGTHS),
        *((family, {}, EXPERTS) for family in MIXTURES),
    ],
    ids=[
        *NAMED,
        "qwen3_moe with dense layers",
        "down_proj of dense layers",
        "lengths of rows",
        *(f"experts of {family}" for family in MIXTURES),
    ],
)
def test_peft_computes_with_the_files_what_was_trained(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, lora: LoraConfig
) -> None:
    save_tiny_model(tmp_path, family, **sizes)
    (ours,) = ranks(1).run(save_lively_adapters, tmp_path, lora)
    before, after = logprobs_with_peft(tmp_path, tmp_path / "adapters")
    tolerance = 1e-5 if TEXT_FAMILIES[family].computes_in_fp32 else 1e-9
    for actual, expected, untouched in zip(ours, after, before, strict=True):
        # transformers' Nemotron-H gives fp32.
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, check_dtype=False)
        assert (expected - untouched).abs().max() > 1e-3


def new_in_bfloat16(folder: Path, lora: LoraConfig) -> tuple[Tensor, set[torch.dtype]]:
    """Log-probabilities with new adapters, and the dtypes in which layers see lengths of rows."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="bfloat16", lora=lora))
    seen: set[torch.dtype] = set()
    for linear in adapted_layers(handle.parts[0]) if lora.dora else []:
        linear.base_forward = watching(linear, seen)
    engine = Engine(handle, OptimizerConfig(decay="constant"))
    return torch.cat(engine.logprobs([pack_microbatch(make_sequences(3, seed=0))])), seen


def watching(linear: Any, seen: set[torch.dtype]) -> Callable[[Tensor], Tensor]:
    forward = linear.base_forward

    def watched(hidden: Tensor) -> Tensor:
        seen.add(linear.lora_magnitude_vector.weight.dtype)
        return forward(hidden)

    return watched


def test_lengths_are_in_fp32_where_layers_compute_in_bfloat16(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", dtype=torch.bfloat16)
    (found, seen), (expected, _) = (ranks(1).run(new_in_bfloat16, tmp_path, lora)[0] for lora in (LENGTHS, LAYERS))
    assert seen == {torch.float32}
    assert torch.equal(found, expected)


def refusal(folder: Path, lora: LoraConfig) -> str:
    with pytest.raises(InputError) as refused:
        ModelHandle.from_pretrained(ModelConfig(path=str(folder), lora=lora))
    return str(refused.value)


def test_lengths_that_peft_could_not_open_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", **DENSE_LAYERS)
    text = ranks(1).run(refusal, tmp_path, LENGTHS)[0]
    assert "PEFT has no row magnitudes for model.layers.0.mlp.gate_proj" in text
    whole = LENGTHS.model_copy(update={"targets": ("q_proj",), "modules_to_save": ("input_layernorm",)})
    assert "what layers train beside adapters would compute in float32" in ranks(1).run(refusal, tmp_path, whole)[0]


def test_adapters_of_several_layers_in_one_are_refused_with_tp(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "phi3")
    model = ModelConfig(path=str(tmp_path), lora=LoraConfig(targets=("qkv_proj",)))
    with pytest.raises(
        AssertionError, match=r"layers\.0\.self_attn\.qkv_proj is several layers in one, whose adapters"
    ):
        ranks(2).run(ModelHandle.from_pretrained, model, ParallelConfig(tp=2))
