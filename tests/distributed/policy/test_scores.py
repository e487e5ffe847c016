"""Scores of a linear head, and losses of them, against transformers' own classes, one sequence at a time."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from automodel_rl.batch import Batch, Microbatch, TokenSequence
from automodel_rl.config import OptimizerConfig
from automodel_rl.config.losses import RewardLossConfig
from automodel_rl.errors import InputError
from automodel_rl.losses import LossOutput, Readout, TokenOutputs, reward_loss, sft_loss
from automodel_rl.policy.policy import Policy
from automodel_rl.quickstart.model import train_tokenizer
from automodel_rl.trainers.ppo import values_of
from tests.distributed.policy.programs import use
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

LENGTHS = (9, 3, 17, 5, 12, 2, 21, 8, 4, 6)
SCORES = Readout(scores=True)
LABELS = 2
CONFIG = RewardLossConfig(centring=0.3)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "pp": {"pp": 2},
    "three data ranks": {"dp_shard": 3},
    "dp and tp": {"dp_shard": 2, "tp": 2},
    "tp with sequence parallelism": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
}


@pytest.fixture(name="model", scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with a tied embedding, which has no linear head."""
    folder = tmp_path_factory.mktemp("scores") / "model"
    save_tiny_model(folder, "qwen3", num_hidden_layers=2, tied=True)
    return folder


def rows_of() -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(1)
    return [
        TokenSequence(
            torch.randint(1, 90, (n,), generator=generator),
            torch.rand(n, generator=generator) < 0.7,
            {"margin": torch.full((n,), 0.1 * (number // 2), dtype=torch.float64)},
        )
        for number, n in enumerate(LENGTHS)
    ]


def value_loss(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
    """A loss of scores at predicting positions, as a critic has it."""
    assert outputs.scores is not None
    total = torch.where(microbatch.loss_mask[:, None], (outputs.scores - 0.5).square(), 0.0).sum()
    return LossOutput({"tokens": total})


def use_scores(folder: Path, sizes: dict[str, Any], program: Any) -> Any:
    """Lets a program use a policy with a linear head, which saves its model with a tokenizer."""
    tokenizer = train_tokenizer(["a few words"], 270)
    return use(folder, sizes, program, tokenizer, microbatch_tokens=32, num_labels=LABELS)


def everything(policy: Policy, folder: Path) -> dict[str, Any]:
    rows = rows_of()
    alone, pairs = Batch(rows), Batch(rows, sequences_per_example=2)
    policy.begin(OptimizerConfig(lr=1e-2, decay="constant"))
    loss = functools.partial(reward_loss, config=CONFIG)
    policy.save(folder / "fresh")
    found: dict[str, Any] = {"scores": policy.scores(alone), "evaluated": policy.evaluate(pairs, loss, SCORES)[0]}
    outputs = [policy.train_step(pairs, loss, SCORES), policy.train_step(alone, value_loss, SCORES)]
    outputs += [policy.train_step(pairs, loss, SCORES)]
    found |= {"losses": [one.loss for one in outputs], "norms": [one.grad_norm for one in outputs]}
    found["accuracy"] = outputs[0].metrics["train/accuracy"]
    policy.save(folder / "trained")
    found["trained"] = policy.scores(alone)
    for refused in (lambda: policy.logprobs(alone), lambda: policy.train_step(alone, sft_loss)):
        with pytest.raises(InputError, match="has a linear head"):
            refused()
    return found


def classifier(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)


def scores_by_transformers(model: Any, row: TokenSequence) -> Tensor:
    """Scores after each token: those of all beginnings of a row."""
    return torch.cat([model(row.input_ids[None, : n + 1]).logits for n in range(len(row))])


def by_transformers(folder: Path) -> dict[str, Any]:
    model, rows = classifier(folder), rows_of()
    ends = torch.stack([model(row.input_ids[None]).logits[0, 0] for row in rows]).view(-1, 2)
    margins = torch.tensor([row.values["margin"][0] for row in rows[::2]], dtype=torch.float64)
    loss = (-F.logsigmoid(ends[:, 0] - ends[:, 1] - margins) + CONFIG.centring * ends.sum(1).square()).mean()
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    return {
        "scores": [scores_by_transformers(model, row).detach() for row in rows],
        "loss": loss.item(),
        "norm": torch.stack([gradient.norm() for gradient in gradients]).norm().item(),
        "accuracy": (ends[:, 0] > ends[:, 1]).double().mean().item(),
    }


@pytest.fixture(name="of_one_rank", scope="module")
def make_of_one_rank(ranks: RankPool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    found: dict[str, Any] = ranks(1).run(use_scores, model, {}, functools.partial(everything, folder=folder))[0]
    return found | {"folder": folder, "expected": by_transformers(folder / "fresh")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_steps_are_those_of_transformers(
    ranks: RankPool, model: Path, of_one_rank: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    sizes, expected = LAYOUTS[layout], of_one_rank["expected"]
    world_size = 1
    for size in sizes.values():
        world_size *= int(size)
    found = of_one_rank
    if layout != "one rank":
        found = ranks(world_size).run(use_scores, model, sizes, functools.partial(everything, folder=tmp_path))[0]
    for ours, theirs in zip(found["scores"], expected["scores"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert found["evaluated"] == pytest.approx(expected["loss"], rel=1e-9)
    assert found["losses"][0] == pytest.approx(expected["loss"], rel=1e-9)
    assert found["norms"][0] == pytest.approx(expected["norm"], rel=1e-9)
    assert found["accuracy"] == pytest.approx(expected["accuracy"])
    # Steps after the first one see what the gradients of both losses have changed.
    assert found["losses"] == pytest.approx(of_one_rank["losses"], rel=1e-8)
    assert found["norms"] == pytest.approx(of_one_rank["norms"], rel=1e-8)


def test_transformers_scores_a_saved_model_as_ours_does(of_one_rank: dict[str, Any]) -> None:
    folder = of_one_rank["folder"] / "trained"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["problem_type"] == "regression"
    assert not (folder / "generation_config.json").exists()
    model = classifier(folder)
    assert model.config.num_labels == LABELS
    for row, ours in zip(rows_of(), of_one_rank["trained"], strict=True):
        torch.testing.assert_close(scores_by_transformers(model, row).detach(), ours, rtol=1e-9, atol=1e-11)


def test_a_head_that_a_checkpoint_has_is_read(ranks: RankPool, of_one_rank: dict[str, Any]) -> None:
    again = ranks(1).run(use_scores, of_one_rank["folder"] / "trained", {}, _begin_and_score)[0]
    for ours, theirs in zip(of_one_rank["trained"], again, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def _begin_and_score(policy: Policy) -> list[Tensor]:
    policy.begin()
    return policy.scores(Batch([dataclasses.replace(row, values={}) for row in rows_of()]))


def _values(policy: Policy) -> list[Tensor]:
    policy.begin()
    return values_of(policy, Batch(rows_of()))


@pytest.mark.parametrize("sizes", [{}, {"cp": 2}], ids=str)
def test_a_value_is_that_of_the_state_before_its_token(
    ranks: RankPool, of_one_rank: dict[str, Any], sizes: dict[str, int]
) -> None:
    folder = of_one_rank["folder"] / "trained"
    found, model = ranks(2 if sizes else 1).run(use_scores, folder, sizes, _values)[0], classifier(folder)
    for row, ours in zip(rows_of(), found, strict=True):
        assert ours[0] == 0
        states = [model(row.input_ids[None, :place]).logits[0, 0].item() for place in range(1, len(row))]
        assert ours[1:].tolist() == pytest.approx(states, rel=1e-9)
