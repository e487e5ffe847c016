"""A policy: rows in, results in their order, on any layout."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_rl.batch import Batch, Packing, TokenSequence, in_packed_order, pack, unpack
from automodel_rl.config import OptimizerConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.losses import LossOutput, Readout, TokenOutputs, sft_loss
from automodel_rl.policy.policy import Policy
from tests.distributed.policy.programs import load, use
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

LENGTHS = (9, 3, 17, 5, 12, 2, 21, 8, 4, 6)

LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "pp": {"pp": 2},
    "three data ranks": {"dp_shard": 3},
    "dp and pp": {"dp_shard": 2, "pp": 2},
    "dp and tp": {"dp_shard": 2, "tp": 2},
    "cp": {"cp": 2},
}


@pytest.fixture(name="model", scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    save_tiny_model(folder, "qwen3", num_hidden_layers=2)
    return folder


def rows_of(count: int = len(LENGTHS)) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(1)
    return [
        TokenSequence(
            torch.randint(1, 90, (n,), generator=generator),
            torch.rand(n, generator=generator) < 0.7,
            {"weight": torch.rand(n, generator=generator, dtype=torch.float64)},
        )
        for n in LENGTHS[:count]
    ]


def weighted(outputs: TokenOutputs, batch: Any, factor: float) -> LossOutput:
    total = torch.where(batch.loss_mask, outputs.logprobs * batch.values["weight"], 0.0).sum()
    return LossOutput({"tokens": -factor * total}, {"train/double": (2 * total.detach(), batch.loss_mask.sum())})


def everything(policy: Policy) -> dict[str, Any]:
    batch = Batch(rows_of(), parts=[[0, 2, 4, 6, 8], [9, 7, 5, 3, 1]])
    policy.begin(OptimizerConfig(lr=1e-2, decay="constant"))
    policy.keep_weights("first")
    loss = lambda outputs, rows: weighted(outputs, rows, 2.0)  # noqa: E731 - a loss of a program's own
    first = policy.logprobs(batch, 0.7)
    outputs = [policy.train_step(part, loss, Readout(0.9)) for part in batch.split()]
    accumulated = [policy.forward_backward(part, sft_loss)[0] for part in batch.split(3)]
    outputs.append(policy.optimizer_step())
    with policy.with_weights("first"):
        with policy.with_changed_weights():
            assert not torch.equal(policy.logprobs(batch, 0.7)[0], first[0])
        again = policy.logprobs(batch, 0.7)  # those of the outer block
    assert not torch.equal(policy.logprobs(batch, 0.7)[0], first[0])
    ((logits, _),) = policy.top_logits(Batch(rows_of(1)), 2)  # fewer rows than data ranks
    assert logits.shape == (LENGTHS[0], 2)
    top, likeliest = policy.top_logits(batch, 3), policy.top_logprobs(batch, 2)
    for (logits, ids), (values, of_values) in zip(top, likeliest, strict=True):
        assert torch.equal(ids[1:, :2], of_values[1:])
        assert torch.allclose(logits[1:, :2] - values[1:], (logits[1:, :1] - values[1:, :1]), atol=1e-12)
        assert (values[1:].exp().sum(1) < 1).all()
    return {
        "logprobs": [values.tolist() for values in first],
        "kept": [values.tolist() for values in again],
        "losses": [output.loss for output in outputs] + accumulated,
        "norms": [output.grad_norm for output in outputs],
        "double": outputs[0].metrics["train/double"],
        "counts": [output.num_tokens for output in outputs],
        "evaluated": policy.evaluate(batch, sft_loss)[0],
        "top": [[logits.tolist(), ids.tolist()] for logits, ids in top],
        "next": policy.next_tokens(batch.sequences),
    }


def by_an_engine(folder: Path) -> dict[str, Any]:
    """The same by an engine of one rank, one sequence in each microbatch."""
    rows, engine = rows_of(), Engine(load(folder, {}), OptimizerConfig(lr=1e-2, decay="constant"))

    def packed(numbers: Any) -> Any:
        return pack([rows[number] for number in numbers], 24, min_microbatches=len(numbers))

    every, parts = packed(range(len(rows))), ([0, 2, 4, 6, 8], [9, 7, 5, 3, 1])

    def logprobs() -> list[list[float]]:
        return [values.tolist() for values in in_packed_order(engine.logprobs(every, 0.7), every)]

    first = logprobs()
    outputs = [engine.train_step(packed(part), functools.partial(weighted, factor=2.0), Readout(0.9)) for part in parts]
    accumulated = [engine.forward_backward(packed(range(n, len(rows), 3)), sft_loss)[0] for n in range(3)]
    outputs.append(engine.optimizer_step())
    top = in_packed_order(engine.top_logits(every, 3), every)
    return {
        "logprobs": first,
        "kept": first,
        "losses": [output.loss for output in outputs] + accumulated,
        "norms": [output.grad_norm for output in outputs],
        "double": outputs[0].metrics["train/double"],
        "counts": [output.num_tokens for output in outputs],
        "evaluated": engine.evaluate(every, sft_loss)[0],
        "top": [[logits.tolist(), ids.tolist()] for logits, ids in top],
        "next": in_packed_order(engine.next_tokens(every).tolist(), every),
    }


@pytest.fixture(name="expected", scope="module")
def make_expected(ranks: RankPool, model: Path) -> dict[str, Any]:
    return ranks(1).run(by_an_engine, model)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_are_those_of_an_engine_in_the_order_of_the_rows(
    ranks: RankPool, model: Path, expected: dict[str, Any], name: str
) -> None:
    sizes = LAYOUTS[name]
    found, *others = ranks(torch.tensor([1, *sizes.values()]).prod().item()).run(use, model, sizes, everything)
    assert others == ["ended"] * len(others)
    for key, value in expected.items():
        one, other = (torch.tensor(_flat(of), dtype=torch.float64) for of in (found[key], value))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


def _flat(values: Any) -> list[float]:
    return [number for value in values for number in _flat(value)] if isinstance(values, list) else [values]


def refusals(policy: Policy) -> list[str]:
    policy.begin(OptimizerConfig(decay="constant"))
    rows, said = rows_of(), []
    strange = TokenSequence(
        torch.tensor([5, 6, 10**6]), torch.ones(3, dtype=torch.bool), {"weight": torch.ones(3, dtype=torch.float64)}
    )
    long = TokenSequence(torch.ones(25, dtype=torch.int64), torch.ones(25, dtype=torch.bool))
    for batch in (Batch([rows[0], strange]), Batch([long])):
        with pytest.raises(InputError) as error:
            policy.train_step(batch, weighted_once)
        said.append(str(error.value))
    with pytest.raises(InputError, match="needs the number of steps"):
        policy.begin(OptimizerConfig(decay="linear"))
    policy.train_step(Batch(rows), weighted_once)  # the ranks are as they were
    raise InputError("; ".join(said))


def weighted_once(outputs: TokenOutputs, batch: Any) -> LossOutput:
    return weighted(outputs, batch, 1.0)


def refused(folder: Path, sizes: dict[str, int]) -> str:
    with pytest.raises(InputError) as error:
        use(folder, sizes, refusals)
    return str(error.value)


def test_a_refusal_leaves_ranks_as_they_were_and_an_error_of_the_program_ends_them_alike(
    ranks: RankPool, model: Path
) -> None:
    for sizes in ({}, {"dp_shard": 3}):
        said = ranks(3 if sizes else 1).run(refused, model, sizes)
        assert len({*said}) == 1
        assert "row 1 has 1000000 in input_ids at index 2" in said[0]
        assert "sequence 0 has 25 tokens but a microbatch holds 24" in said[0]


def test_rows_go_back_to_their_places_in_unequal_shares() -> None:
    batch = Batch(rows_of())
    dealt = Packing(24, 3).deal(batch.lengths)
    rows = [row for share in dealt for places in share for row in places]
    assert sorted(rows) == [*range(len(batch))]
    assert len({len(share) for share in dealt}) == 1
    assert rows != sorted(rows)
    assert unpack(torch.zeros(3), pack(rows_of(2)[1:], 24)[0])[0].shape == (3,)
