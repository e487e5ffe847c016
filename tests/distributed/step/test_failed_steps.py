"""A step that fails leaves no trace, and microbatches that no step can run are refused on every rank."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from automodel_rl import (
    Engine,
    LinearLoss,
    LossOutput,
    Microbatch,
    ModelHandle,
    OptimizerConfig,
    ParallelConfig,
    TokenOutputs,
    TokenSequence,
    sft_loss,
)
from automodel_rl.batch import empty_microbatch, pack_microbatch, set_values
from automodel_rl.config import ModelConfig
from automodel_rl.config.parallel import Fsdp
from automodel_rl.errors import InputError, MicrobatchError, PeerError
from automodel_rl.hf.buckets import whole_tensors
from automodel_rl.losses import Readout
from tests.rank_pool import RankPool
from tests.tiny import VOCAB, make_sequences, save_tiny_model


def make_engine(folder: Path, parallel: ParallelConfig, dtype: str = "float64") -> Engine:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype=dtype), parallel)
    return Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))


def microbatches_of(engine: Engine, step: int, num_microbatches: int = 3) -> list[Microbatch]:
    seed = 100 * step + 10 * engine.handle.layout.data_rank
    return [pack_microbatch(make_sequences(2 + i, seed=seed + i)) for i in range(num_microbatches)]


class Failing:
    """sft's loss, which raises at its second call."""

    def __init__(self, raised: BaseException):
        self.raised, self.calls = raised, 0

    def __call__(self, outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        self.calls += 1
        if self.calls == 2:
            raise self.raised
        return sft_loss(outputs, microbatch)


def train_with_failures(
    folder: Path, parallel: ParallelConfig, dtype: str, out: Path, fails: tuple[int, ...] | None
) -> list[str]:
    """Two steps, saved, with a failed one before each on the data ranks that are named, and a failed evaluation."""
    engine = make_engine(folder, parallel, dtype)
    caught: list[str] = []
    for step in range(2):
        loss = Failing(KeyError("planted")) if engine.handle.layout.data_rank in (fails or ()) else sft_loss
        for attempt in (engine.train_step, engine.evaluate) if fails else ():
            try:
                attempt(microbatches_of(engine, 7 + step), loss)
            except MicrobatchError as error:
                chained = isinstance(error, PeerError) or isinstance(error.__cause__, KeyError)
                caught += [] if chained else ["not chained"]
                caught.append(f"{type(error).__name__}: {error}")
            if isinstance(loss, Failing):
                loss.calls = 0
        if fails:  # what a sync reads, right after a failure
            sources = engine.handle.hf_sources(engine.handle.components[0], torch.float32)
            assert all(
                t.isfinite().all() for _, t in whole_tensors(sources, engine.handle.family, engine.handle.layout)
            )
        engine.train_step(microbatches_of(engine, step), sft_loss)
    engine.handle.save_pretrained(out)
    return caught


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


LAYOUTS = [
    ({}, "float64", (0,)),
    ({}, "bfloat16", (0,)),  # gradients of other microbatches wait in another dtype
    ({"dp_shard": 2}, "float64", (0, 1)),
    ({"dp_shard": 2}, "float64", (1,)),
    ({"dp_shard": 2, "fsdp": "reshard"}, "bfloat16", (1,)),
    ({"dp_shard": 2, "pp": 2, "fsdp": "reshard"}, "float64", (0,)),
    ({"pp": 2}, "float64", (0,)),
    ({"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}, "float64", (0,)),
    ({"tp": 2, "sequence_parallel": True}, "float64", (0,)),
    ({"cp": 2}, "float64", (0,)),
]


@pytest.mark.parametrize(("sizes", "dtype", "fails"), LAYOUTS, ids=str)
def test_a_loss_that_raises_and_is_caught_leaves_no_trace(
    ranks: RankPool, tmp_path: Path, sizes: dict, dtype: str, fails: tuple[int, ...]
) -> None:
    save_tiny_model(tmp_path, tied="pp" in sizes)
    parallel = ParallelConfig(**sizes)
    run = functools.partial(ranks(parallel.world_size).run, train_with_failures, tmp_path, parallel, dtype)
    run(tmp_path / "undisturbed", None)
    for caught in run(tmp_path / "disturbed", fails):
        assert len(caught) == 4
        assert all("loss of microbatch 1 on stage" in text and "KeyError: 'planted'" in text for text in caught)
        assert all(f"{__file__}:" in text and "in __call__)" in text for text in caught)  # the caller's own line
    undisturbed, disturbed = (tensors_in(tmp_path / name) for name in ("undisturbed", "disturbed"))
    assert undisturbed.keys() == disturbed.keys()
    assert all(torch.equal(tensor, disturbed[name]) for name, tensor in undisturbed.items())


def test_a_loss_that_raises_on_one_data_rank_raises_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    parallel = ParallelConfig(pp=2, dp_shard=2)
    caught = ranks(4).run(train_with_failures, tmp_path, parallel, "float64", tmp_path / "out", (1,))
    kinds = [[text.partition(":")[0] for text in of_rank] for of_rank in caught]
    # The last stage of data rank 1 is rank 3; what is evaluated is known to all of its stages.
    here, there = "MicrobatchError", "PeerError"
    assert kinds == [[there] * 4, [there, here] * 2, [there] * 4, [here] * 4]
    assert "another rank failed, rank 3: loss of microbatch 1 on stage 1 failed" in caught[0][0]


def interrupted(folder: Path) -> Iterator[Callable[[Engine], Any]]:
    """Ways in which a step of a lone rank can end in its midst."""
    yield lambda engine: engine.train_step(microbatches_of(engine, 5), Failing(KeyboardInterrupt()))

    def in_backward(engine: Engine) -> None:
        _, parameter = next(iter(engine.handle.named_parameters()))
        hook = parameter.register_post_accumulate_grad_hook(lambda _: 1 / 0)
        try:
            engine.train_step(microbatches_of(engine, 5), sft_loss)
        finally:
            hook.remove()

    yield in_backward

    def in_forward(engine: Engine) -> None:
        layer = engine.handle.parts[0].model.layers[2].mlp
        hook = layer.register_forward_hook(lambda *_: 1 / 0)
        try:
            engine.train_step(microbatches_of(engine, 5), sft_loss)
        finally:
            hook.remove()

    yield in_forward

    def in_reading(engine: Engine) -> None:
        engine.runner.forward(microbatches_of(engine, 5), lambda *_: 1 / 0)

    yield in_reading

    def in_a_layer_while_reading(engine: Engine) -> None:
        hook = engine.handle.parts[0].model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
        try:
            engine.logprobs(microbatches_of(engine, 5))
        finally:
            hook.remove()

    yield in_a_layer_while_reading


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("dtype", "fsdp"), [("float64", "keep"), ("bfloat16", "keep"), ("bfloat16", "reshard")])
def test_a_step_that_is_interrupted_anywhere_leaves_no_trace(tmp_path: Path, dtype: str, fsdp: Fsdp) -> None:
    save_tiny_model(tmp_path)
    undisturbed, disturbed = (make_engine(tmp_path, ParallelConfig(fsdp=fsdp), dtype) for _ in range(2))
    for interrupt in interrupted(tmp_path):
        with pytest.raises((KeyboardInterrupt, MicrobatchError)):
            interrupt(disturbed)
        for engine in (undisturbed, disturbed):
            engine.train_step(microbatches_of(engine, 1), sft_loss)
        pairs = zip(undisturbed.handle.named_hf_tensors(), disturbed.handle.named_hf_tensors(), strict=True)
        assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)


@pytest.mark.usefixtures("one_rank")
def test_a_handle_that_cannot_be_put_right_tells_what_came_first(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=1)
    engine = make_engine(tmp_path, ParallelConfig())
    broken = mock.patch("automodel_rl.step.runner.abandon_step", side_effect=RuntimeError("device-side assert"))
    with broken, pytest.raises(MicrobatchError, match="loss of microbatch 1 on stage 0 failed: KeyError") as raised:
        engine.train_step(microbatches_of(engine, 0), Failing(KeyError("planted")))
    assert raised.value.__notes__ == ["the model can no longer be used: RuntimeError: device-side assert"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite_are_compared_like_others(tmp_path: Path, value: float) -> None:
    save_tiny_model(tmp_path, num_layers=1)
    engine = make_engine(tmp_path, ParallelConfig())
    microbatches = [
        set_values(microbatch, "ref_logprobs", torch.full((microbatch.num_tokens,), value))
        for microbatch in microbatches_of(engine, 0)
    ]
    assert len(engine.logprobs(microbatches)) == sum(microbatch.num_sequences for microbatch in microbatches)


def refusals(folder: Path, parallel: ParallelConfig, kind: str) -> list[str]:
    """What each way to use microbatches says of bad ones."""
    engine = make_engine(folder, parallel)
    layout = engine.handle.layout
    microbatches = microbatches_of(engine, 0)
    if kind == "fewer" and layout.data_rank == 1:
        microbatches = microbatches[:1]
    elif kind == "none" and layout.data_rank == 0:
        microbatches = []
    elif kind == "other" and layout.pp_rank == 1:
        microbatches = microbatches_of(engine, 1)
    elif kind == "values":  # as rewards that are drawn on every rank anew would be
        noise = torch.Generator().manual_seed(layout.pp_rank)
        microbatches = [
            set_values(microbatch, "advantages", torch.randn(microbatch.num_tokens, generator=noise))
            for microbatch in microbatches
        ]
    elif kind.lstrip("-").isdecimal() and layout.data_rank == parallel.num_data_ranks - 1:
        ids = torch.tensor([5, int(kind), 7])
        microbatches[1] = pack_microbatch([TokenSequence(ids, torch.ones(3, dtype=torch.bool))])
    said = []
    uses: list[Callable[[], Any]] = [
        lambda: engine.train_step(microbatches, sft_loss),
        lambda: engine.evaluate(microbatches, sft_loss),
        lambda: engine.logprobs(microbatches),
        lambda: engine.next_tokens(microbatches),
    ]
    for use in uses:
        try:
            use()
            said.append("")
        except InputError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("token", [VOCAB, 999, -1, -100])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_token_ids_outside_the_vocabulary_are_refused_on_every_rank(
    ranks: RankPool, tmp_path: Path, sizes: dict, token: int
) -> None:
    save_tiny_model(tmp_path)
    parallel = ParallelConfig(**sizes)
    for said in ranks(2).run(refusals, tmp_path, parallel, str(token)):
        for text in said:
            assert (
                f"rank 1: microbatch 1 has {token} in input_ids at place 1, but the model's token ids are 0 to 127"
                in text
            )


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ({"dp_shard": 2}, "fewer", "data ranks have [3, 1] microbatches: pass each the same number"),
        ({"dp_shard": 2}, "none", "data ranks have [0, 3] microbatches: pass each the same number"),
        ({"pp": 2, "dp_shard": 2}, "fewer", "data ranks have [3, 1] microbatches: pass each the same number"),
        ({"pp": 2}, "other", "the ranks of data rank 0 have different microbatches"),
        ({"pp": 2}, "values", "the ranks of data rank 0 have different values in their microbatches"),
    ],
)
def test_rows_that_do_not_fit_each_other_are_refused_on_every_rank(
    ranks: RankPool, tmp_path: Path, sizes: dict, kind: str, message: str
) -> None:
    save_tiny_model(tmp_path)
    parallel = ParallelConfig(**sizes)
    for said in ranks(parallel.world_size).run(refusals, tmp_path, parallel, kind):
        assert all(text.startswith(message) for text in said), said


def train_on_nothing(folder: Path, parallel: ParallelConfig) -> tuple[list[tuple[bool, bool]], bool, int, list]:
    engine = make_engine(folder, parallel)
    engine.train_step(microbatches_of(engine, 0), sft_loss)  # so that AdamW remembers something
    before = [tensor.clone() for _, tensor in engine.handle.named_hf_tensors()]
    untrained = [
        pack_microbatch([TokenSequence(s.input_ids, torch.zeros_like(s.loss_mask)) for s in make_sequences(2, seed=i)])
        for i in range(2)
    ]
    outputs = [
        engine.train_step(microbatches, sft_loss)
        for microbatches in ([], untrained, [empty_microbatch(), empty_microbatch()])
    ]
    same = all(torch.equal(old, new) for old, (_, new) in zip(before, engine.handle.named_hf_tensors(), strict=True))
    nothing = [engine.logprobs([]), engine.next_tokens([empty_microbatch()]).tolist()]
    return [(o.skipped, o.nothing_to_train) for o in outputs], same, engine.skipped_in_a_row, nothing


@pytest.mark.parametrize("sizes", [{}, {"dp_shard": 2}, {"pp": 2}], ids=str)
def test_a_batch_without_a_trained_token_changes_no_weight_and_says_so(
    ranks: RankPool, tmp_path: Path, sizes: dict
) -> None:
    save_tiny_model(tmp_path)
    parallel = ParallelConfig(**sizes)
    for outputs, same, skipped_in_a_row, nothing in ranks(parallel.world_size).run(
        train_on_nothing, tmp_path, parallel
    ):
        assert outputs == [(True, True)] * 3
        assert same
        assert skipped_in_a_row == 0  # nothing has diverged
        assert nothing == [[], []]


def wrong_losses(folder: Path) -> list[str]:
    engine = make_engine(folder, ParallelConfig())
    wrong: list[Any] = [
        lambda outputs, microbatch: outputs.logprobs.sum(),
        lambda outputs, microbatch: LossOutput({"token": outputs.logprobs.sum()}),
        lambda outputs, microbatch: LossOutput({}),
    ]
    said = []
    for loss in wrong:
        with pytest.raises(MicrobatchError) as raised:
            engine.train_step(microbatches_of(engine, 0), loss)
        said.append(str(raised.value))
    return said


def test_a_loss_that_gives_something_else_is_told_what_to_give(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    tensor, name, nothing = ranks(1).run(wrong_losses, tmp_path)[0]
    assert "TypeError: the loss returned a Tensor: return a LossOutput" in tensor
    assert "ValueError: the loss returned sums over 'token': name what divides them, tokens, sequences" in name
    assert "ValueError: the loss returned sums over nothing" in nothing
    for message in (tensor, name, nothing):  # with the user's file and line
        assert re.search(r"\(.*test_failed_steps.py:\d+\)", message), message


def gradients(folder: Path, parallel: ParallelConfig) -> list[dict[str, torch.Tensor]]:
    runner = make_engine(folder, parallel).runner
    microbatches = [pack_microbatch(make_sequences(2 + i, seed=i)) for i in range(2)]
    microbatches = microbatches[runner.layout.data_rank :: parallel.num_data_ranks]
    runner.forward_backward(microbatches, sft_loss, Readout(), runner.global_batch(microbatches).counts)
    return [{name: gradient.cpu() for name, gradient in runner.handle.named_hf_gradients()}]


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"pp": 2}], ids=str)
def test_gradients_are_had_by_hugging_face_names(ranks: RankPool, tmp_path: Path, sizes: dict, family: str) -> None:
    save_tiny_model(tmp_path, family, tied="pp" in sizes)
    (expected,) = ranks(1).run(gradients, tmp_path, ParallelConfig())[0]
    assert expected.keys() == load_file(tmp_path / "model.safetensors").keys()
    found: dict[str, torch.Tensor] = {}
    for (of_rank,) in ranks(2).run(gradients, tmp_path, ParallelConfig(**sizes)):
        found |= of_rank
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 1e-9 * max(gradient.abs().max().item(), 1e-3), name


def fail_in_weights(folder: Path, parallel: ParallelConfig) -> tuple[str, bool]:
    """The error of a linear loss whose weights raise on one data rank alone, and whether it trains afterwards."""
    engine = make_engine(folder, parallel)
    is_bad = engine.handle.layout.data_rank == 1

    def weights(microbatch: Microbatch) -> torch.Tensor:
        return microbatch.values["advantages"] if is_bad else -microbatch.loss_mask.float()

    with pytest.raises(MicrobatchError) as caught:
        engine.train_step(microbatches_of(engine, 0), LinearLoss(weights))
    return str(caught.value), engine.train_step(microbatches_of(engine, 1), sft_loss).skipped


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_weights_of_a_linear_loss_that_raise_are_a_failed_loss_everywhere(
    ranks: RankPool, tmp_path: Path, sizes: dict
) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    parallel = ParallelConfig(**sizes)
    for message, skipped in ranks(parallel.world_size).run(fail_in_weights, tmp_path, parallel):
        assert "advantages" in message
        assert not skipped


SOME = make_sequences(2, seed=0)
ZEROS = torch.zeros(3)


def three_dimensions(microbatch: Microbatch) -> torch.Tensor:
    return torch.ones(microbatch.num_tokens, 2, 2)


def two_columns(microbatch: Microbatch) -> torch.Tensor:
    return torch.ones(microbatch.num_tokens, 2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda: LinearLoss(three_dimensions)(TokenOutputs(ZEROS), pack_microbatch(SOME)), "pass one, or K, for each"),
        (lambda: LinearLoss(two_columns)(TokenOutputs(ZEROS), pack_microbatch(SOME)), "2 tokens .*, but none are read"),
        (
            lambda: LinearLoss(lambda microbatch: microbatch.loss_mask, "foo"),
            "denominator='foo': it must be one of tokens",
        ),
    ],
    ids=["shape", "ids", "denominator"],
)
def test_linear_losses_of_another_shape_or_unknown_denominator_are_refused(
    loss: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loss()
