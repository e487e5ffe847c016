"""Log-probabilities of given token ids, and losses of them, against plain transformers, one sequence at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_rl.batch import Batch, TokenSequence, in_packed_order, pack, set_values, unpack
from automodel_rl.config import OptimizerConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.losses import LinearLoss, LossOutput, Readout, TokenOutputs
from automodel_rl.policy.policy import Policy
from tests.distributed.policy.programs import load, use
from tests.distributed.policy.test_policy import LAYOUTS, LENGTHS
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

WIDTH, TEMPERATURE = 4, 0.7
SOFT = LinearLoss(lambda microbatch: -microbatch.values["weights"], "tokens")
READOUT = Readout(TEMPERATURE, ids="ids")


@pytest.fixture(name="model", scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given") / "model"
    save_tiny_model(folder, "qwen3", num_hidden_layers=2)
    return folder


def rows_of() -> list[TokenSequence]:
    """Rows with token ids for each place, none for some and one of them twice, and weights; both of a few tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for n in LENGTHS:
        ids = torch.randint(-1, 90, (n, WIDTH), generator=generator)
        ids[:, 1] = ids[:, 0]
        counted = torch.rand(n, generator=generator) < 0.7
        weights = torch.rand(n, WIDTH, generator=generator, dtype=torch.float64) * counted[:, None]
        tokens = torch.randint(1, 90, (n,), generator=generator)
        rows.append(TokenSequence(tokens, counted, {"ids": ids, "weights": weights}))
    return rows


def curved(outputs: TokenOutputs, microbatch: Any) -> LossOutput:
    """A loss whose gradient is not known before: of probabilities."""
    assert outputs.ids_logprobs is not None
    probabilities = torch.where(microbatch.values["ids"] >= 0, outputs.ids_logprobs.exp(), 0.0)
    return LossOutput({"tokens": (microbatch.values["weights"] * probabilities.square()).sum()})


def everything(policy: Policy) -> dict[str, Any]:
    batch = Batch(rows_of())
    policy.begin(OptimizerConfig(lr=1e-2, decay="constant"))
    found: dict[str, Any] = {
        "at": policy.logprobs(batch, TEMPERATURE, ids="ids"),
        "top": policy.top_logprobs(batch, policy.vocab_size - 5),  # more than a rank has of a vocabulary in two
        "evaluated": [policy.evaluate(batch, loss, READOUT)[0] for loss in (SOFT, curved)],
    }
    outputs = [policy.train_step(batch, loss, READOUT) for loss in (curved, SOFT, curved)]
    found["losses"], found["norms"] = [one.loss for one in outputs], [one.grad_norm for one in outputs]
    return found


def by_transformers(folder: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows, num_tokens = rows_of(), sum(int(row.loss_mask[1:].sum()) for row in rows_of())

    def at(row: TokenSequence, logprobs: Tensor) -> Tensor:
        ids = row.values["ids"][1:]
        return torch.where(ids >= 0, logprobs.gather(1, ids.clamp_min(0)), 0.0)

    found: dict[str, Any] = {"at": [], "top": [], "losses": [], "norms": []}
    for loss in ("curved", "soft"):
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            logits = model(row.input_ids[None]).logits[0, :-1]
            values = at(row, (logits / TEMPERATURE).log_softmax(-1))
            weights = row.values["weights"][1:]
            if loss == "soft":
                total = total - (weights * values).sum()
                found["at"].append(values.detach())
                found["top"].append(logits.log_softmax(-1).topk(logits.shape[1] - 5).values.detach())
            else:
                real = row.values["ids"][1:] >= 0
                total = total + (weights * torch.where(real, values.exp(), 0.0).square()).sum()
        gradients = torch.autograd.grad(total / num_tokens, [*model.parameters()])
        found["losses"].append((total / num_tokens).item())
        found["norms"].append(torch.stack([gradient.norm() for gradient in gradients]).norm().item())
    return found


@pytest.fixture(name="expected", scope="module")
def make_expected(model: Path) -> dict[str, Any]:
    return by_transformers(model)


@pytest.fixture(name="of_one_rank", scope="module")
def make_of_one_rank(ranks: RankPool, model: Path) -> dict[str, Any]:
    found: dict[str, Any] = ranks(1).run(use, model, {}, everything)[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_ids_are_scored_and_trained_as_by_transformers(
    ranks: RankPool, model: Path, expected: dict[str, Any], of_one_rank: dict[str, Any], layout: str
) -> None:
    sizes = LAYOUTS[layout]
    world_size = 1
    for size in sizes.values():
        world_size *= size
    found = of_one_rank if layout == "one rank" else ranks(world_size).run(use, model, sizes, everything)[0]
    for ours, theirs in zip(found["at"], expected["at"], strict=True):
        torch.testing.assert_close(ours[1:], theirs, rtol=1e-9, atol=1e-11)
        assert not ours[0].any()
    for (ours, _), theirs in zip(found["top"], expected["top"], strict=True):
        torch.testing.assert_close(ours[1:], theirs, rtol=1e-9, atol=1e-11)
    curved_loss, soft_loss = expected["losses"]
    assert found["evaluated"] == pytest.approx([soft_loss, curved_loss], rel=1e-9)
    assert found["losses"][0] == pytest.approx(curved_loss, rel=1e-9)
    assert found["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-9)
    # Steps after the first one see what the gradients of both losses have changed.
    assert found["losses"] == pytest.approx(of_one_rank["losses"], rel=1e-8)
    assert found["norms"] == pytest.approx(of_one_rank["norms"], rel=1e-8)


def soft_step(policy: Policy) -> tuple[float, float]:
    policy.begin(OptimizerConfig(lr=1e-2, decay="constant"))
    output = policy.train_step(Batch(rows_of()), SOFT, READOUT)
    return output.loss, output.grad_norm


def test_a_gradient_made_in_the_forward_is_that_of_transformers(
    ranks: RankPool, model: Path, expected: dict[str, Any]
) -> None:
    loss, norm = ranks(2).run(use, model, {"tp": 2}, soft_step)[0]
    assert loss == pytest.approx(expected["losses"][1], rel=1e-9)
    assert norm == pytest.approx(expected["norms"][1], rel=1e-9)


def by_an_engine(folder: Path) -> tuple[list[Tensor], str]:
    """Log-probabilities of ids by an engine, and what it says of ids that the model does not have."""
    engine = Engine(load(folder, {}))
    microbatches = pack(rows_of(), 64)
    scored = engine.add_logprobs(microbatches, "at", TEMPERATURE, ids="ids")
    found = [piece for one in scored for piece in unpack(one.values["at"], one)]
    beyond = [set_values(one, "ids", one.values["ids"] + 200) for one in microbatches]
    with pytest.raises(ValueError, match="those of the model are 0 to") as error:
        engine.add_logprobs(beyond, "at", TEMPERATURE, ids="ids")
    return in_packed_order(found, microbatches), str(error.value)


def test_an_engine_takes_values_of_several_entries(ranks: RankPool, model: Path, expected: dict[str, Any]) -> None:
    found, _ = ranks(1).run(by_an_engine, model)[0]
    for ours, theirs in zip(found, expected["at"], strict=True):
        torch.testing.assert_close(ours[1:], theirs, rtol=1e-9, atol=1e-11)


def strange_ids(policy: Policy) -> list[str]:
    rows, problems = rows_of(), []
    short = [TokenSequence(row.input_ids, row.loss_mask, {"ids": row.values["ids"].int()}) for row in rows]
    beyond = [TokenSequence(row.input_ids, row.loss_mask, {"ids": row.values["ids"] + 200}) for row in rows]
    for batch, name in ((Batch(rows), "other"), (Batch(short), "ids"), (Batch(beyond), "ids")):
        with pytest.raises(InputError) as error:
            policy.logprobs(batch, ids=name)
        problems.append(str(error.value))
    return problems


def test_ids_that_the_model_does_not_have_are_refused(ranks: RankPool, model: Path) -> None:
    missing, of_int, beyond = ranks(2).run(use, model, {"tp": 2}, strange_ids)[0]
    assert "ids='other': the rows have values ['ids', 'weights']" in missing
    assert "pass int64 [n, K]" in of_int
    assert "or -1 for none" in beyond
