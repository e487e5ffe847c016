"""What is refused, and that every place knows the same names."""

import typing

import pytest

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.attention import ATTENTION, Attention
from automodel_rl.config.model import MemoryConfig
from automodel_rl.config.parallel import Schedule
from automodel_rl.errors import InputError
from automodel_rl.model.attention import BACKENDS
from automodel_rl.parallel.combinations import ModelDescription, check_supported
from automodel_rl.parallel.pipeline import schedules

SHAPE = ModelDescription(
    family="qwen3", num_layers=27, num_heads=8, num_kv_heads=4, vocab_size=1000, mlp_size=64, num_experts=0
)
MOE = {"family": "qwen3_moe", "num_experts": 6}


def test_configs_and_tables_know_the_same_schedules_and_attention_backends() -> None:
    assert set(typing.get_args(Schedule)) == set(schedules.SCHEDULES)
    assert set(typing.get_args(Attention)) - {"auto"} == set(ATTENTION) == set(BACKENDS)


def test_schedules_that_split_the_backward_need_a_new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(pp=2, schedule="ZBVZeroBubble", virtual_stages=2)
    monkeypatch.setattr(schedules, "TORCH", (2, 13))
    check_supported(SHAPE, ModelConfig(path="m"), parallel, MemoryConfig())
    monkeypatch.setattr(schedules, "TORCH", (2, 11))
    with pytest.raises(InputError, match="ZBVZeroBubble needs torch 2.13, and this is"):
        check_supported(SHAPE, ModelConfig(path="m"), parallel, MemoryConfig())


@pytest.mark.parametrize(
    ("shape", "model", "parallel", "message"),
    [
        ({}, {}, {"tp": 8}, "parallel.tp=8 must divide the 4 key-value heads: use a smaller tp"),
        ({"num_heads": 6}, {}, {"tp": 4}, "parallel.tp=4 must divide the 6 attention heads"),
        ({"vocab_size": 1001}, {}, {"tp": 2}, "parallel.tp=2 must divide the 1001 tokens in the vocabulary"),
        ({"mlp_size": 65}, {}, {"tp": 2}, "parallel.tp=2 must divide the 65 columns in the MLP"),
        (MOE, {}, {"tp": 2}, "parallel.tp=2: the layers of a 'qwen3_moe' model cannot be split over tp: use tp=1"),
        ({}, {"implementation": "nemo_automodel"}, {"tp": 2}, "splits transformers' classes only"),
        ({}, {}, {"sequence_parallel": True}, "sequence_parallel=true needs parallel.tp of at least 2"),
        ({}, {}, {"ep": 2, "dp_shard": 2}, "parallel.ep=2: a 'qwen3' model has no experts: use ep=1"),
        (MOE, {}, {"ep": 2}, "parallel.ep=2 must divide parallel.dp_shard x parallel.cp = 1"),
        (MOE, {}, {"ep": 4, "cp": 4}, "parallel.ep=4 must divide the model's 6 experts"),
        ({}, {}, {"virtual_stages": 2}, "parallel.virtual_stages=2 needs parallel.pp of at least 2"),
        ({}, {}, {"pp": 2, "virtual_stages": 2}, "1F1B has 1 on each rank: use virtual_stages=1"),
        ({}, {}, {"pp": 2, "schedule": "Interleaved1F1B"}, "Interleaved1F1B has at least 2 on each rank"),
        ({}, {}, {"pp": 2, "schedule": "DualPipeV", "virtual_stages": 3}, "DualPipeV has 2 on each rank"),
        ({}, {}, {"dp_replicate": 2}, "parallel.dp_replicate=2 needs parallel.dp_shard x parallel.cp of"),
        ({"family": "gpt2"}, {}, {}, "a 'gpt2' model .* is not supported: use one of llama, mistral, qwen2, qwen3"),
        ({"family": "qwen2"}, {"implementation": "nemo_automodel"}, {}, "use one of llama, qwen3"),
        ({"is_quantized": True}, {}, {}, "config.json has a quantization_config, .* convert the checkpoint"),
        ({"is_bidirectional": True}, {}, {}, "use_bidirectional_attention, and attention here is causal"),
        ({"has_softcap": True}, {"attention": "sdpa"}, {}, "a soft cap in its attention: use model.attention=eager"),
        ({"family": "gpt_oss"}, {"attention": "varlen"}, {}, "sinks in its attention: use model.attention=eager"),
        ({}, {"attention": "te", "dtype": "float32"}, {}, "attention=te computes in bfloat16, not float32"),
        ({"has_windows": True}, {"attention": "te"}, {"cp": 2}, "no sliding windows there: use varlen"),
        ({}, {"implementation": "nemo_automodel", "dtype": "float64"}, {}, "model.dtype=float64"),
        ({}, {"lora": {}}, {"tp": 2}, "adapters need parallel.tp=1 and model.implementation=transformers"),
        ({}, {"moe": {"aux_loss": 0.1}}, {}, "model.moe.aux_loss=0.1: a 'qwen3' model has no softmax router"),
        (MOE, {"moe": {"bias_update_rate": 0.1}}, {}, "routers of a 'qwen3_moe' model have no bias: set it to 0"),
        ({"noise": {"resid_pdrop": 0.1}}, {}, {}, "config.json has resid_pdrop=0.1, .* set it to 0"),
        ({"rope_types": ("default", "longrope")}, {}, {}, "rope_type=longrope, whose frequencies depend on the length"),
        ({"rope_types": ("dynamic",)}, {}, {}, "rope_type=dynamic, .* use a checkpoint with another rope_type"),
        ({}, {"attention": "varlen", "dtype": "float32"}, {}, "computes in bfloat16, not float32"),
    ],
)
def test_unsupported_combinations_are_refused_with_a_remedy(
    shape: dict, model: dict, parallel: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_supported(
            ModelDescription(**{**vars(SHAPE), **shape}),
            ModelConfig(path="m", **model),
            ParallelConfig(**parallel),
            MemoryConfig(),
        )


@pytest.mark.parametrize(
    ("parallel", "recomputed", "message"),
    [
        ({"tp": 2}, "none", "memory.compile=true with parallel.tp=2: split layers cannot be compiled"),
        ({"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}, "none", "ZBVZeroBubble splits the backward"),
        ({"pp": 2}, "selective", "compiled layers overwrite what it keeps: use full or none"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    monkeypatch: pytest.MonkeyPatch, parallel: dict, recomputed: str, message: str
) -> None:
    monkeypatch.setattr(schedules, "TORCH", (2, 13))
    memory = MemoryConfig(compile=True, activation_checkpointing=recomputed)
    with pytest.raises(InputError, match=message):
        check_supported(SHAPE, ModelConfig(path="m"), ParallelConfig(**parallel), memory)


def test_selective_recomputation_with_a_split_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "TORCH", (2, 13))
    parallel = ParallelConfig(pp=2, schedule="DualPipeV", virtual_stages=2)
    with pytest.raises(InputError, match="DualPipeV goes through the backward twice, .* use full"):
        check_supported(SHAPE, ModelConfig(path="m"), parallel, MemoryConfig(activation_checkpointing="selective"))
