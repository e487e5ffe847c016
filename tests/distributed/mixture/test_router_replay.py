"""Routers follow routes: the experts of every pass, and gradients, on every layout, schedule and kind of recomputation.

The reference (tools/verify/one_process.py) writes every kind of router out anew, over one sequence at a time.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import Microbatch, RouterShape, Routes, TokenSequence, pack_microbatch
from automodel_rl.compat.versions import TORCH
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import MicrobatchError
from automodel_rl.losses import Readout, count, sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import gather_whole
from automodel_rl.step.runner import StepRunner
from automodel_rl.tools.verify.command import FLOAT32, FLOAT64
from automodel_rl.tools.verify.comparison import Case, make_sequences
from automodel_rl.tools.verify.routes import with_routes
from tests.distributed.parallel.test_parity import assert_equal, differences
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model
from tests.tiny_families import VOCAB

SPLIT = pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot split the backward")
INTERLEAVED = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
DENSE_FIRST = {"num_experts": 8, "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("sizes", "recomputed"),
    [
        ({"pp": 2}, "selective"),
        (INTERLEAVED, "none"),
        ({"dp_shard": 2, "ep": 2}, "selective"),
        pytest.param({"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}, "full", marks=SPLIT),
    ],
    ids=str,
)
def test_layouts_with_routes_equal_one_process(ranks: RankPool, tmp_path: Path, sizes: dict, recomputed: str) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", **DENSE_FIRST)
    memory = MemoryConfig(activation_checkpointing=recomputed)
    assert_equal(
        differences(ranks, tmp_path, Case(ParallelConfig(**sizes), (3, 5), memory=memory, replay=True)), FLOAT64
    )


def test_27_layers_of_which_the_first_is_dense_map_by_number(ranks: RankPool, tmp_path: Path) -> None:
    sizes = {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1}
    save_tiny_model(tmp_path, "deepseek_v3", num_layers=27, **sizes)
    case = Case(ParallelConfig(pp=2, layers_per_stage=(13, 14)), (1,), replay=True)
    assert_equal(differences(ranks, tmp_path, case), FLOAT32)


def test_uneven_virtual_stages_of_27_layers_map_by_number(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", num_layers=27, **DENSE_FIRST)
    case = Case(ParallelConfig(**INTERLEAVED, layers_per_stage=(7, 6, 8, 6)), (2,), replay=True)
    assert_equal(differences(ranks, tmp_path, case), FLOAT64)


# Gradients of the same microbatches, bit for bit.

Gradients = dict[str, Tensor]


def microbatches_of(shape: RouterShape, num_microbatches: int) -> list[Microbatch]:
    """Microbatches of which every token of every one has experts of its own, as many tokens for each expert in every
    microbatch.

    The second microbatch's routes are the first one's in another order: what a queue of routes would mix up unnoticed.
    """
    (sequence,) = make_sequences(1, 3, VOCAB, longest=24)
    experts = with_routes(sequence, shape).routes.experts  # type: ignore[union-attr]
    microbatches = []
    for number in range(num_microbatches):
        turned = Routes(shape.layers, torch.cat([experts[:-1].roll(number, 0), experts[-1:]]))
        microbatches.append(pack_microbatch([TokenSequence(sequence.input_ids, sequence.loss_mask, routes=turned)]))
    return microbatches


def gradients(
    folder: Path, parallel: dict, recomputed: str, dtype: str = "float32", num_microbatches: int = 4
) -> Gradients:
    """Of this rank's stages."""
    memory = MemoryConfig(activation_checkpointing=recomputed)
    model = ModelConfig(path=str(folder), dtype=dtype)
    handle = ModelHandle.from_pretrained(model, ParallelConfig(**parallel), memory)
    return backward(handle, microbatches_of(handle.router_shape, num_microbatches))


def backward(handle: ModelHandle, microbatches: Sequence[Microbatch]) -> Gradients:
    parallel, data_rank = handle.layout.parallel, handle.layout.data_rank
    StepRunner(handle).forward_backward(
        microbatches[data_rank :: parallel.num_data_ranks], sft_loss, Readout(), count(microbatches)
    )
    found = {name: gather_whole(p.grad, handle.layout).clone() for name, p in handle.named_parameters()}
    handle.zero_grad()
    return found


@pytest.mark.parametrize(
    ("parallel", "recomputed", "dtype", "tolerance"),
    [
        ({"pp": 2}, "none", "float32", 0.0),
        ({"pp": 2}, "full", "float32", 0.0),
        ({"pp": 2}, "selective", "float32", 0.0),
        (INTERLEAVED, "full", "float32", 0.0),
        pytest.param({"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}, "full", "float32", 0.0, marks=SPLIT),
        ({"cp": 2, "ep": 2}, "full", "float64", 1e-12),  # sums in another order
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_rank(
    ranks: RankPool, tmp_path: Path, parallel: dict, recomputed: str, dtype: str, tolerance: float
) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", dtype=torch.float32, **DENSE_FIRST)
    (expected,) = ranks(1).run(gradients, tmp_path, {}, "none", dtype)
    for found in ranks(2).run(gradients, tmp_path, parallel, recomputed, dtype):
        for name, gradient in found.items():
            scale = expected[name].abs().max().item()
            assert (gradient - expected[name]).abs().max().item() <= tolerance * scale, name
            assert scale > 0, name


def mixed_up(folder: Path) -> tuple[Gradients, Gradients]:
    """Gradients as they should be, and of a pipeline where every microbatch's recomputation has the last microbatch's
    routes."""
    right = gradients(folder, {"pp": 2}, "full")
    handle = ModelHandle.from_pretrained(
        ModelConfig(path=str(folder), dtype="float32"),
        ParallelConfig(pp=2),
        MemoryConfig(activation_checkpointing="full"),
    )
    microbatches = microbatches_of(handle.router_shape, 4)
    for extras in handle.extras:
        scope = extras.microbatch_scope
        for router in extras.router_watch.routers.values():
            router.register_forward_pre_hook(lambda *_, scope=scope: newest(scope))
    return right, backward(handle, microbatches)


def newest(scope: object) -> None:
    """The planted bug: one binding for the whole stage, which the newest forward has set."""
    if torch._C._current_graph_task_id() == -1:
        scope.newest = scope.microbatch  # type: ignore[attr-defined]
    else:
        scope.microbatch = scope.newest  # type: ignore[attr-defined]


def test_routes_of_another_microbatch_in_flight_are_noticed(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", dtype=torch.float32, **DENSE_FIRST)
    (right, wrong), _ = ranks(2).run(mixed_up, tmp_path)  # the last stage has one microbatch at a time
    scale = max(gradient.abs().max().item() for gradient in right.values())
    assert max((wrong[name] - right[name]).abs().max().item() for name in right) > 1e-3 * scale


def loads_of(folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of every expert in every layer: as counted on this rank, and of the routes of the whole microbatch."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32"), ParallelConfig(cp=2))
    microbatches = microbatches_of(handle.router_shape, 2)
    backward(handle, microbatches)
    counted, experts = (
        handle.extras[0].router_watch.loads,
        torch.cat([microbatch.routes.experts for microbatch in microbatches]),
    )  # type: ignore
    return list(counted.values()), [experts[:, m][experts[:, m] >= 0].bincount(minlength=8) for m in range(3)]


def test_load_is_where_routes_send_real_tokens(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", dtype=torch.float32, **DENSE_FIRST)
    (one, routed), (other, _) = ranks(2).run(loads_of, tmp_path)
    num_tokens = 2 * len(make_sequences(1, 3, VOCAB, longest=24)[0])
    for mine, others, expected in zip(one, other, routed, strict=True):
        free = mine + others - expected  # tokens without a route
        assert (free >= 0).all()
        assert free.sum() + expected.sum() == 2 * num_tokens  # top-2, and nothing for pads
        assert expected.sum() > free.sum() > 0


# What must not stay behind.


def fail_once(folder: Path, parallel: dict) -> tuple[list[bool], bool, bool]:
    """What a failure in the midst of a step leaves: microbatches still held, and whether the next passes are right."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32"), ParallelConfig(**parallel))
    engine, microbatches = Engine(handle), microbatches_of(handle.router_shape, 4)
    plain = [pack_microbatch([sequence_of(microbatch)]) for microbatch in microbatches]
    live, right = torch.cat(engine.logprobs(plain)), backward(handle, microbatches)
    assert not torch.equal(torch.cat(engine.logprobs(microbatches)), live)
    planted = next(iter(handle.extras[-1].router_watch.routers.values())).register_forward_hook(fail_at(2))
    with pytest.raises(MicrobatchError, match="planted"):
        backward(handle, microbatches)
    held = [extras.microbatch_scope.microbatch is not None for extras in handle.extras]
    planted.remove()
    handle.zero_grad()
    same = torch.equal(torch.cat(engine.logprobs(plain)), live)  # not by what the failed step had bound
    again = backward(handle, microbatches)
    return held, same, all(torch.equal(again[name], right[name]) for name in right)


def sequence_of(microbatch: Microbatch) -> TokenSequence:
    return TokenSequence(microbatch.input_ids, torch.cat([torch.zeros(1, dtype=torch.bool), microbatch.loss_mask[:-1]]))


def fail_at(call: int) -> Callable[..., None]:
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("planted")

    return hook


def test_a_failed_step_leaves_nothing_bound(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", dtype=torch.float32, **DENSE_FIRST)
    assert ranks(1).run(fail_once, tmp_path, {}) == [([False], True, True)]


def refusals(folder: Path) -> list[str]:
    """What is said of routes that are not this model's."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32"))
    (microbatch,) = microbatches_of(handle.router_shape, 1)
    experts = microbatch.routes.experts  # type: ignore[union-attr]
    sequence, found = sequence_of(microbatch), []
    for routes in (Routes((1, 2), experts[:, :2]), Routes((1, 2, 3), experts[..., :1])):
        wrong = pack_microbatch([TokenSequence(sequence.input_ids, sequence.loss_mask, routes=routes)])
        with pytest.raises(Exception) as caught:  # noqa: PT011
            backward(handle, [wrong])
        found.append(str(caught.value))
    return found


def test_routes_of_another_model_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "mixture", "qwen3_moe", dtype=torch.float32, **DENSE_FIRST)
    ((layer, experts),) = ranks(1).run(refusals, tmp_path / "mixture")
    assert layer == "routes of layers (1, 2) cannot be followed in layer 3"
    assert "should have chosen 1 experts for each of" in experts
