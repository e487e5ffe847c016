"""Layouts: which layers a stage holds, and what is refused."""

import pytest

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.errors import InputError
from automodel_rl.parallel import schedules
from automodel_rl.parallel.combinations import ModelDescription, check_supported
from automodel_rl.parallel.stages import layers_per_stage, modules_of_stages

SHAPE = ModelDescription(
    family="qwen3", num_layers=27, num_heads=8, num_kv_heads=4, vocab_size=1000, mlp_size=64, num_experts=0
)
MOE = {"family": "qwen3_moe", "num_experts": 6}


def test_schedules_that_split_the_backward_need_a_new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(pp=2, schedule="ZBVZeroBubble", virtual_stages=2)
    monkeypatch.setattr(schedules, "version", lambda _: "2.13.0+cpu")
    check_supported(SHAPE, ModelConfig(path="m"), parallel, MemoryConfig())
    monkeypatch.setattr(schedules, "version", lambda _: "2.11.0+cu130")
    with pytest.raises(InputError, match="ZBVZeroBubble needs torch 2.13, and this is 2.11.0"):
        check_supported(SHAPE, ModelConfig(path="m"), parallel, MemoryConfig())


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "given", "filled"),
    [("1F1B", 1, 1, 4), ("1F1B", 1, 9, 9), ("GPipe", 1, 1, 1), ("Interleaved1F1B", 2, 9, 10), ("DualPipeV", 2, 3, 8)],
)
def test_rows_are_filled_up_to_a_number_that_the_schedule_runs(
    schedule: str, virtual_stages: int, given: int, filled: int
) -> None:
    parallel = ParallelConfig(pp=4, schedule=schedule, virtual_stages=virtual_stages)
    assert schedules.fill_up_to(given, parallel) == filled


def test_layers_are_spread_evenly_with_the_last_stage_shortest() -> None:
    assert layers_per_stage(27, ParallelConfig(pp=2)) == (14, 13)
    assert layers_per_stage(27, ParallelConfig(pp=4)) == (7, 7, 7, 6)


def test_a_list_of_layers_is_taken_as_it_is() -> None:
    assert layers_per_stage(27, ParallelConfig(pp=2, layers_per_stage=(13, 14))) == (13, 14)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(pp=28), "parallel.pp=28: the model has 27 layers .*use no more than 27 stages"),
        (ParallelConfig(pp=2, layers_per_stage=(13, 13)), "adds up to 26 but the model has 27 layers"),
        (ParallelConfig(pp=3, layers_per_stage=(13, 14)), "lists 2 stages but parallel.pp=3 makes 3"),
    ],
)
def test_splits_that_do_not_fit_are_refused(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layers_per_stage(27, parallel)


def test_first_stage_embeds_and_last_has_the_head() -> None:
    first, last = modules_of_stages((1, 2))
    assert set(first) == {"model.embed_tokens", "model.rotary_emb", "model.layers.0"}
    assert set(last) == {"model.layers.1", "model.layers.2", "model.rotary_emb", "model.norm", "lm_head"}


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
        ({"has_windows": True}, {"attention": "te"}, {"cp": 2}, "no sliding windows there: use model.attention=varlen"),
        ({}, {"implementation": "nemo_automodel", "dtype": "float64"}, {}, "model.dtype=float64"),
        ({}, {"lora": {}}, {"tp": 2}, "adapters need parallel.tp=1 and model.implementation=transformers"),
        ({}, {"moe": {"aux_loss": 0.1}}, {}, "model.moe.aux_loss=0.1: a 'qwen3' model has no softmax router"),
        (MOE, {"moe": {"bias_update_rate": 0.1}}, {}, "routers of a 'qwen3_moe' model have no bias: set it to 0"),
        ({"attention_dropout": 0.1}, {}, {}, "config.json has attention_dropout=0.1, .* set it to 0"),
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
    ("parallel", "message"),
    [
        ({"tp": 2}, "memory.compile=true with parallel.tp=2: split layers cannot be compiled"),
        ({"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}, "ZBVZeroBubble splits the backward"),
    ],
)
def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch, parallel: dict, message: str) -> None:
    monkeypatch.setattr(schedules, "version", lambda _: "2.13.0")
    with pytest.raises(InputError, match=message):
        check_supported(SHAPE, ModelConfig(path="m"), ParallelConfig(**parallel), MemoryConfig(compile=True))


def test_selective_recomputation_with_a_split_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "version", lambda _: "2.13.0")
    parallel = ParallelConfig(pp=2, schedule="DualPipeV", virtual_stages=2)
    with pytest.raises(InputError, match="DualPipeV goes through the backward twice, .* use full"):
        check_supported(SHAPE, ModelConfig(path="m"), parallel, MemoryConfig(activation_checkpointing="selective"))
