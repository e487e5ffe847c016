"""Adapters on a base in nf4 against PEFT on plain transformers with bitsandbytes' dequantized weights, in float64."""

from pathlib import Path
from typing import Literal

import bitsandbytes.functional
import pytest
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from safetensors.torch import load_file, save_file
from torch import Tensor

from automodel_rl.batch import pack_microbatch
from automodel_rl.config import MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig, WeightSyncConfig
from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import TransformersGeneratorConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.generators.generator_ranks import GeneratorRanks
from automodel_rl.generators.make_generator import make_generator
from automodel_rl.hf.names import pieces
from automodel_rl.hf.tokenizer import load_tokenizer
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.quantized.base import quantized_weights
from automodel_rl.quickstart.model import train_tokenizer
from tests.distributed.lora.test_lora import STEPS, sequences_of, train_with_peft
from tests.quantized import NF4_SIZES, VOCAB, save_nf4_model
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"), base="nf4")
OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=0.5, decay="constant")


def train(
    folder: Path, parallel: ParallelConfig, memory: MemoryConfig, lora: LoraConfig = LORA
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains adapters and writes them before and after; the losses and the merged model."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", lora=lora), parallel, memory)
    engine = Engine(handle, OPTIMIZER)
    handle.save_pretrained(folder / "initial")
    losses = []
    for step in range(STEPS):
        microbatches = [
            pack_microbatch(sequences_of(step, handle.layout.data_rank, microbatch)) for microbatch in range(3)
        ]
        losses.append(engine.train_step(microbatches, sft_loss).loss)
    handle.save_pretrained(folder / "trained")
    return losses, {name: tensor.clone() for name, tensor in handle.named_hf_tensors()}


def dequantized(weight: Tensor) -> Tensor:
    """What bitsandbytes makes of a weight: quantized by blocks of 64, and back."""
    codes, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    with torch.compiler.set_stance("force_eager"):
        return _dequantize_4bit_compute(
            codes.flatten(), state.absmax, state.code, 64, tuple(weight.shape), weight.dtype
        )


def save_dequantized(folder: Path, plain: Path) -> None:
    """A plain checkpoint with the values that a quantized base of another has."""
    save_tiny_model(plain, "llama", dtype=torch.float32, **NF4_SIZES)
    tensors = load_file(folder / "model.safetensors")
    of_layers = {name: dequantized(tensor) for name, tensor in tensors.items() if name.endswith("proj.weight")}
    assert any(not torch.equal(tensor, tensors[name]) for name, tensor in of_layers.items())
    save_file({**tensors, **of_layers}, plain / "model.safetensors", {"format": "pt"})


LENGTHS = LORA.model_copy(update={"dora": True})


@pytest.mark.parametrize(
    ("sizes", "memory", "lora"),
    [
        ({}, {}, LORA),
        ({}, {"activation_checkpointing": "full"}, LORA),
        ({}, {"compile": True}, LORA),
        ({}, {"compile": True}, LENGTHS),
        ({"dp_shard": 3, "fsdp": "reshard"}, {"activation_checkpointing": "full"}, LENGTHS),
        ({"pp": 2}, {}, LORA),
        ({"cp": 2}, {"activation_checkpointing": "selective"}, LORA),
        ({"dp_shard": 2, "fsdp": "keep"}, {}, LORA),
        ({"dp_shard": 3, "fsdp": "reshard"}, {}, LORA),  # shards of uneven numbers of rows
        ({"pp": 2, "dp_shard": 2, "fsdp": "reshard"}, {"activation_checkpointing": "full"}, LORA),
    ],
)
def test_training_is_that_of_peft_on_dequantized_weights(
    ranks: RankPool, tmp_path: Path, sizes: dict, memory: dict, lora: LoraConfig
) -> None:
    folder, plain = tmp_path / "model", tmp_path / "plain"
    save_tiny_model(folder, "llama", dtype=torch.float32, **NF4_SIZES)
    save_dequantized(folder, plain)
    parallel = ParallelConfig(**sizes)
    of_ranks = ranks(parallel.world_size).run(train, folder, parallel, MemoryConfig(**memory), lora)
    losses, merged = of_ranks[0]
    # The compiler's own float64 differs in the ninth digit, with a plain base, too.
    rtol, atol = (1e-7, 1e-4) if memory.get("compile") else (1e-12, 1e-9)
    expected_losses, expected, reference = train_with_peft(folder, plain, parallel.num_data_ranks, "adamw")
    assert losses == pytest.approx(expected_losses, rel=rtol)
    saved = load_file(folder / "trained" / "adapter_model.safetensors")
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=atol)
    whole = reference.model.merge_and_unload().state_dict()
    assert {name for _, of_rank in of_ranks for name in of_rank} == whole.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("memory", [{}, {"compile": True}, {"activation_checkpointing": "selective"}])
def test_no_plain_weight_is_kept_for_the_backward(ranks: RankPool, tmp_path: Path, memory: dict) -> None:
    save_tiny_model(tmp_path, "llama", dtype=torch.float32, **NF4_SIZES)
    kept = ranks(1).run(kept_for_backward, tmp_path, MemoryConfig(**memory))[0]
    plain = {(64, 64), (32, 64), (192, 64), (64, 192)}
    assert not {shape for shape, dtype in kept if dtype.is_floating_point} & plain
    if "activation_checkpointing" not in memory:
        assert {shape for shape, dtype in kept if dtype == torch.uint8} >= {(64, 32), (192, 32), (64, 96)}


def kept_for_backward(folder: Path, memory: MemoryConfig) -> set[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what a forward keeps, but for a layer's first step, which compiles."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32", lora=LORA), memory=memory)
    engine, kept = Engine(handle, OPTIMIZER), set()

    def note(tensor: Tensor) -> Tensor:
        kept.add((tuple(tensor.shape), tensor.dtype))
        return tensor

    microbatches = [pack_microbatch(make_sequences(3, seed=0))]
    engine.train_step(microbatches, sft_loss)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.train_step(microbatches, sft_loss)
    return kept


@pytest.mark.parametrize("family", ["falcon_h1", "phi3", "gemma2", "olmo_hybrid"])
def test_every_kind_of_layer_computes_with_dequantized_weights(ranks: RankPool, tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path / "model", family, dtype=torch.float32, **NF4_SIZES)
    losses, in_nf4 = ranks(1).run(train_all_linear, tmp_path / "model", "nf4")[0]
    assert len(in_nf4) > 10
    save_tiny_model(tmp_path / "plain", family, dtype=torch.float32, **NF4_SIZES)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    tensors |= {name: dequantized(tensors[name]) for name in in_nf4}
    save_file(tensors, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    expected, _ = ranks(1).run(train_all_linear, tmp_path / "plain", "plain")[0]
    assert losses == pytest.approx(expected, rel=1e-12)


SPLIT_SIZES = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 32}
"""Sizes of which a half is whole blocks."""


@pytest.mark.parametrize(
    ("family", "targets", "sizes"),
    [
        ("qwen2", ("all-linear",), {"tp": 2}),
        ("llama", ("all-linear",), {"tp": 2, "dp_shard": 2, "fsdp": "reshard"}),
        ("llama", ("all-linear",), {"tp": 2, "pp": 2, "sequence_parallel": True}),
        ("phi3", ("o_proj", "down_proj"), {"tp": 2}),  # queries, keys and values in one layer
        ("qwen2_moe", ("all-linear",), {"tp": 2, "ep": 2, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_split_layers_compute_with_dequantized_weights(
    ranks: RankPool, tmp_path: Path, family: str, targets: tuple[str, ...], sizes: dict
) -> None:
    of_mixture = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128} if "moe" in family else {}
    for name in ("model", "plain"):
        save_tiny_model(tmp_path / name, family, dtype=torch.float32, **SPLIT_SIZES, **of_mixture)
    parallel = ParallelConfig(**sizes)
    run = ranks(parallel.world_size).run
    found = run(train_split, tmp_path / "model", "nf4", targets, parallel)
    in_nf4 = {name for *_, names in found for name in names}
    assert len(in_nf4) > 10
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    save_file(
        {**tensors, **{name: dequantized(tensors[name]) for name in in_nf4}},
        tmp_path / "plain" / "model.safetensors",
        {"format": "pt"},
    )
    expected = run(train_split, tmp_path / "plain", "plain", targets, parallel)
    for (losses, merged, _), (right, plain, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(right, rel=1e-12)
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, plain[name], rtol=0, atol=1e-9, msg=name)


def train_split(
    folder: Path, base: Literal["plain", "nf4"], targets: tuple[str, ...], parallel: ParallelConfig
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses, the merged model, and the names in files of this rank's weights in nf4."""
    lora = LoraConfig(rank=4, targets=targets, base=base)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", lora=lora), parallel)
    engine, rank = Engine(handle, OPTIMIZER), handle.layout.data_rank
    losses = [
        engine.train_step([pack_microbatch(make_sequences(2 + rank, 7 * step + rank))], sft_loss).loss
        for step in range(3)
    ]
    names = [
        piece.name
        for part in handle.parts
        for name, held, _ in quantized_weights(part)
        for piece in pieces(name, tuple(held.plain().shape), handle.family)
    ]
    return losses, {name: tensor.clone() for name, tensor in handle.named_hf_tensors()}, names


def refusal_of_a_split(folder: Path) -> str:
    with pytest.raises(InputError) as refusal:
        ModelHandle.from_pretrained(ModelConfig(path=str(folder), lora=LORA), ParallelConfig(tp=2))
    return str(refusal.value)


def test_rows_that_are_cut_within_a_block_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", **NF4_SIZES)
    assert (
        "which are not whole blocks of 64: use base=plain, or another tp"
        in ranks(2).run(refusal_of_a_split, tmp_path)[0]
    )


def train_all_linear(folder: Path, base: Literal["plain", "nf4"]) -> tuple[list[float], list[str]]:
    """The losses of a training, and the names of the weights that are in nf4."""
    lora = LoraConfig(rank=4, targets=("all-linear",), base=base)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", lora=lora))
    engine = Engine(handle, OPTIMIZER)
    losses = [engine.train_step([pack_microbatch(make_sequences(3, step))], sft_loss).loss for step in range(3)]
    return losses, [name for name, *_ in quantized_weights(handle.parts[0])]


def test_codes_of_a_published_checkpoint_stay(ranks: RankPool, tmp_path: Path) -> None:
    save_nf4_model(tmp_path, is_nested=True)
    found = load_file(tmp_path / "model.safetensors")
    for codes in ranks(1).run(codes_of, tmp_path)[0].items():
        torch.testing.assert_close(codes[1].flatten(), found[codes[0]].flatten(), rtol=0, atol=0)


def codes_of(folder: Path) -> dict[str, Tensor]:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", lora=LORA))
    (part,) = handle.parts
    assert not handle.quantized_here
    return {name: held.codes.detach().clone() for name, held, _ in quantized_weights(part)}


def test_a_plain_weight_among_published_codes_is_known(ranks: RankPool, tmp_path: Path) -> None:
    """Uploads with some weights in bfloat16 exist. Generators that get adapters alone would compute with those."""
    save_nf4_model(tmp_path, is_nested=True)
    found, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    tensors = {key: tensor for key, tensor in found.items() if not key.startswith(name)}
    save_file({**tensors, name: plain[name]}, tmp_path / "model.safetensors", {"format": "pt"})
    train_tokenizer(["a text"], VOCAB).save_pretrained(tmp_path)
    assert (
        ranks(1)
        .run(refusal_of_adapters_alone, tmp_path)[0]
        .startswith(f"weight_sync.adapters=alone with model.lora.base=nf4: {name} is not nf4 with blocks of 64")
    )


def refusal_of_adapters_alone(folder: Path) -> str:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32", lora=LORA))
    spec = GeneratorSpec(TransformersGeneratorConfig(), 8, WeightSyncConfig(adapters="alone"))
    with pytest.raises(InputError) as refusal:
        make_generator(spec, handle, load_tokenizer(folder, VOCAB), GeneratorRanks.join(spec))
    return str(refusal.value)
