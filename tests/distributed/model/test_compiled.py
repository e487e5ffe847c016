"""Compiled layers: a graph with gradients and one without for each kind of layer, and the same numbers as uncompiled.

A backend of attention that a graph can hold stands in for the fused kernels, and torch's tracer alone for the compiler.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from automodel_rl import Engine, ModelHandle, OptimizerConfig, sft_loss
from automodel_rl.batch import AttentionCall, Microbatch, empty_microbatch, pack_microbatch
from automodel_rl.config import LoraConfig, ModelConfig, MoEConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.engine.warm_up import warm_up
from automodel_rl.model import softmax
from automodel_rl.model.attention import BACKENDS, AttentionParameters
from automodel_rl.model.part_forward import layers_of
from automodel_rl.support.attention import ATTENTION
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model, save_tiny_multimodal_model

STEPS, STEPS_OF_MANY = 20, 8
"""Steps of one rank, and of several, which only train: compiling on all of them takes long."""


def masked(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, parameters: AttentionParameters) -> Tensor:
    """Attention with one mask over all sequences, made of tensors alone."""
    queries, keys = torch.arange(len(q)), torch.arange(len(k))
    of_query = torch.searchsorted(call.cu_queries, queries, right=True)
    of_key = torch.searchsorted(call.cu_keys, keys, right=True)
    before_end = (call.cu_queries[of_query] - queries)[:, None] - (call.cu_keys[of_key] - keys)[None]
    seen = (of_query[:, None] == of_key[None]) & (before_end <= 0)
    if parameters.window is not None:
        seen = seen & (before_end > -parameters.window)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, seen, scale=parameters.scale, enable_gqa=True)
    return output[0].transpose(0, 1)


@contextmanager
def traced_only(with_attention: bool = True) -> Iterator[None]:
    """Traces layers, attention included or between two graphs."""
    traceable = dataclasses.replace(ATTENTION["sdpa"], is_traceable=with_attention)
    tracer = functools.partial(torch.compile, backend="aot_eager", dynamic=True)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(BACKENDS, sdpa=masked))
        stack.enter_context(mock.patch.dict(ATTENTION, sdpa=traceable))
        stack.enter_context(mock.patch("automodel_rl.model.compiled_layers.compile_for_any_size", tracer))
        for name in ("score", "gradient"):  # of the head; tests/gpu compiles them
            plain = getattr(softmax, f"_{name}")
            stack.enter_context(mock.patch.object(softmax, f"_compiled_{name}", plain))
        yield


def microbatches_of(step: int) -> list[Microbatch]:
    """From one sequence to many, of one token to many; every third step with a microbatch that is empty."""
    count = 1 + 7 * step % 11
    microbatches = [pack_microbatch(make_sequences(count + m, seed=10 * step + m)) for m in range(2)]
    return [*microbatches, empty_microbatch(microbatches[0])] if step % 3 == 0 else microbatches


def train(
    folder: Path, parallel: ParallelConfig, memory: MemoryConfig, options: dict, steps: int | None = None
) -> tuple[list[tuple[float, float]], list[int], dict]:
    """Loss and gradient norm of each step, the number of graphs after each, and why graphs were broken."""
    torch._dynamo.reset()
    counters.clear()
    model = ModelConfig(path=str(folder), attention="sdpa", **options)
    with traced_only():
        handle = ModelHandle.from_pretrained(model, parallel, memory)
        engine = Engine(handle, OptimizerConfig(lr=1e-3, decay="constant"))
        results, graphs = [], []
        alone = handle.layout.parallel.world_size == 1
        for step in range(steps or (STEPS if alone else STEPS_OF_MANY)):
            microbatches = microbatches_of(step + 51 * handle.layout.data_rank)
            output = engine.train_step(microbatches, sft_loss)
            if alone:
                engine.logprobs(microbatches)
            results.append((output.loss, output.grad_norm, output.metrics.get("moe/load_max", 0.0)))
            graphs.append(counters["stats"]["unique_graphs"])
    return results, graphs, dict(counters["graph_break"])


MIXTURE = {"dtype": "bfloat16", "moe": MoEConfig(aux_loss=0.1)}
CASES = [
    ("qwen3_moe", {}, "full", MIXTURE),
    ("qwen3_moe", {"dp_shard": 2, "ep": 2}, "full", MIXTURE),
    ("qwen3_moe", {}, "none", {"dtype": "bfloat16", "lora": LoraConfig(rank=8, targets=("q_proj", "experts"))}),
    ("qwen3", {}, "full", {"lora": LoraConfig(rank=8)}),
    ("qwen3", {}, "selective", {"lora": LoraConfig(rank=8)}),
    ("qwen3", {"cp": 2}, "none", {}),
    ("qwen3", {"cp": 2, "cp_exchange": "all_to_all"}, "full", {}),
    ("qwen3", {"tp": 2, "sequence_parallel": True}, "selective", {}),
    ("qwen3", {"tp": 2, "sequence_parallel": True}, "full", {}),
]


@pytest.mark.parametrize(("family", "sizes", "recomputed", "options"), CASES, ids=str)
def test_microbatches_of_any_size_need_no_graph_of_their_own(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, recomputed: str, options: dict
) -> None:
    options = {"dtype": "float32", **options}
    save_tiny_model(tmp_path, family, num_layers=2)
    parallel = ParallelConfig(**sizes)
    run = functools.partial(ranks(parallel.world_size).run, train, tmp_path, parallel)
    ((expected, none, _), *_) = run(MemoryConfig(compile=False, activation_checkpointing=recomputed), options)
    ((found, graphs, breaks), *_) = run(MemoryConfig(compile=True, activation_checkpointing=recomputed), options)
    assert none[-1] == 0
    assert len({*graphs[1:]}) == 1, graphs
    if parallel.ep == 1:  # otherwise FSDP gathers experts within a layer, and the host learns how many tokens they get
        assert (graphs[1], breaks) == (2 if parallel.world_size == 1 else 1, {})
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4 if options["dtype"] == "float32" else 2e-2)


UNITS_WITHIN = [  # decays, and experts
    ("falcon_h1", {}, True, "full"),
    ("qwen3_5_text", {}, True, "selective"),
    ("olmo_hybrid", {}, False, "selective"),
    ("deepseek_v3", {"dp_shard": 2, "ep": 2}, False, "selective"),
]


@pytest.mark.parametrize(("family", "sizes", "compiled", "recomputed"), UNITS_WITHIN, ids=str)
def test_layers_with_fsdp_units_within_recompute_what_they_had(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, compiled: bool, recomputed: str
) -> None:
    """FSDP's hooks break graphs, and do more in a recomputation than in the forward."""
    save_tiny_model(tmp_path, family, num_layers=4)
    run = functools.partial(ranks(ParallelConfig(**sizes).world_size).run, train, tmp_path, ParallelConfig(**sizes))
    options = {"dtype": "float64"}
    ((expected, *_), *_) = run(MemoryConfig(compile=False, activation_checkpointing="none"), options, 2)
    ((found, *_), *_) = run(MemoryConfig(compile=compiled, activation_checkpointing=recomputed), options, 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def kept_of_layers(folder: Path, parallel: ParallelConfig) -> list[list[int]]:
    """Sizes of what recomputed layers keep in a step, in units of a layer's input if as large: uncompiled, compiled."""
    found = []
    for compiled in (False, True):
        sizes: list[int] = []
        with traced_only() if compiled else nullcontext():
            memory = MemoryConfig(activation_checkpointing="full", compile=compiled)
            handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), attention="sdpa"), parallel, memory)
            for layer in layers_of(handle.parts[0]):
                layer.forward = _watched(layer.forward, sizes)
            microbatch = pack_microbatch(make_sequences(8, seed=handle.layout.data_rank))
            Engine(handle, OptimizerConfig(lr=1e-3, decay="constant")).train_step([microbatch], sft_loss)
        found.append(sorted(sizes))
    return found


def _watched(forward: Callable[..., Tensor], sizes: list[int]) -> Callable[..., Tensor]:
    def call(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def note(kept: Tensor) -> Tensor:
            if not isinstance(kept, nn.Parameter) and kept.is_floating_point() and kept.numel() >= hidden.numel():
                sizes.append(kept.numel() // hidden.numel())
            return kept

        with saved_tensors_hooks(note, lambda kept: kept):
            return forward(hidden, *args, **kwargs)

    return call


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"cp": 2, "cp_exchange": "all_to_all"}], ids=str)
def test_recomputed_layers_keep_no_tensor_that_ranks_exchange(ranks: RankPool, tmp_path: Path, sizes: dict) -> None:
    """Keys and values of a long row, gathered, would be larger than all else that a layer keeps."""
    save_tiny_model(tmp_path, "qwen3")
    for uncompiled, compiled in ranks(2).run(kept_of_layers, tmp_path, ParallelConfig(**sizes)):
        assert max(uncompiled) == 1
        assert max(compiled) == 1  # attention's result is as large as the input


def warm_up_and_train(folder: Path, parallel: ParallelConfig, warms_up: bool) -> tuple[list[float], list[int]]:
    """Losses and gradient norms of two steps, and the number of graphs before each and at the end."""
    torch._dynamo.reset()
    counters.clear()
    model = ModelConfig(path=str(folder), dtype="bfloat16", attention="sdpa", moe=MoEConfig(bias_update_rate=0.1))
    with traced_only():
        handle = ModelHandle.from_pretrained(model, parallel, MemoryConfig(compile=True))
        engine = Engine(handle, OptimizerConfig(lr=1e-3, decay="constant"))
        if warms_up:
            warm_up(engine, max_tokens=64)
        results, graphs = [], [counters["stats"]["unique_graphs"]]
        for step in range(2):
            microbatches = microbatches_of(step + 1 + 51 * handle.layout.data_rank)
            logprobs = engine.logprobs(microbatches)
            output = engine.train_step(microbatches, sft_loss)
            results += [output.loss, output.grad_norm, float(torch.cat(logprobs).sum())]
            graphs.append(counters["stats"]["unique_graphs"])
    return results, graphs


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=str)
def test_a_warm_up_leaves_no_graph_to_steps_and_changes_none(ranks: RankPool, tmp_path: Path, sizes: dict) -> None:
    save_tiny_model(tmp_path, "deepseek_v3", num_layers=2)
    parallel = ParallelConfig(**sizes)
    (plain, (none, *_)), *_ = ranks(parallel.world_size).run(warm_up_and_train, tmp_path, parallel, False)
    (warm, graphs), *_ = ranks(parallel.world_size).run(warm_up_and_train, tmp_path, parallel, True)
    assert none == 0
    assert graphs[0] > 0
    assert len({*graphs}) == 1
    assert warm == plain


def warm_up_apart(folder: Path) -> tuple[bool, int, bool]:
    """Whether this rank is without the language model, its graphs after a warm-up, and whether gradients are left."""
    torch._dynamo.reset()
    counters.clear()
    model = ModelConfig(path=str(folder), dtype="bfloat16", attention="sdpa")
    with traced_only():
        handle = ModelHandle.from_pretrained(model, memory=MemoryConfig(compile=True), components=APART)
        engine = Engine(handle, OptimizerConfig(lr=1e-3, decay="constant"))
        warm_up(engine, max_tokens=64)
    return handle.layout.is_outsider, counters["stats"]["unique_graphs"], engine.has_gradients


APART = ComponentsConfig.model_validate({"vision": {"ranks": 0}, "language": {"ranks": 1}})


def test_ranks_of_an_encoder_take_part_in_a_warm_up(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path, "llava", num_layers=2)
    outsider, reader = ranks(2).run(warm_up_apart, tmp_path)
    assert outsider == (True, 0, False)
    assert reader[0] is False
    assert reader[1] > 0
    assert reader[2] is False
