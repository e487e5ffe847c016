"""Gradients of several forwards and backwards, one optimizer step: against plain transformers and torch's AdamW."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_rl import Engine, LoraConfig, MicrobatchError, ModelHandle, OptimizerConfig, ParallelConfig
from automodel_rl.batch import DataShare, Microbatch, TokenSequence, pack
from automodel_rl.config import ModelConfig
from automodel_rl.losses import UNDIVIDED, token_loss
from automodel_rl.optimizers import AdamWSettings
from automodel_rl.parallel.sharding import gather_whole
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

STEPS = (
    (("cross_entropy", {}), AdamWSettings(3e-3, (0.8, 0.9), 1e-6, 0.1, max_grad_norm=0.5)),
    (("importance_sampling", {}), AdamWSettings(1e-3, (0.9, 0.99), 1e-8)),
    (("ppo", {"clip_low_threshold": 0.95}), AdamWSettings(2e-3)),
    (("cispo", {"clip_high_threshold": 1.1}), AdamWSettings(2e-3, max_grad_norm=1.0)),
    (("dro", {"beta": 0.3}), AdamWSettings(2e-3)),
)
"""Loss and optimizer settings of each optimizer step."""

CALLS = ((7, 1), (3, 2), (5, 3))
"""Number of sequences and seed of each forward and backward of a step."""


def sequences_of(number: int, seed: int) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for sequence in make_sequences(number, seed):
        draws = torch.randn(3, len(sequence), generator=generator, dtype=torch.float64)
        values = {"weights": draws[0], "advantages": draws[1] * sequence.loss_mask, "logprobs": draws[2] * 0.2 - 4}
        made.append(TokenSequence(sequence.input_ids, torch.ones(len(sequence), dtype=torch.bool), values))
    return made


def make_engine(folder: Path, parallel: ParallelConfig, lora: LoraConfig | None = None) -> Engine:
    model = ModelConfig(path=str(folder), dtype="float64", lora=lora)
    return Engine(ModelHandle.from_pretrained(model, parallel), OptimizerConfig(decay="constant"))


def microbatches_of(engine: Engine, number: int, seed: int) -> list[Microbatch]:
    layout = engine.handle.layout
    share = DataShare(layout.data_rank, layout.parallel.num_data_ranks)
    return pack(sequences_of(number, seed), 24, share=share)


def train_step(engine: Engine, step: int) -> tuple[float, float]:
    """Loss and gradient norm of one step of several forwards and backwards."""
    (name, config), settings = STEPS[step % len(STEPS)]
    loss = sum(
        engine.forward_backward(microbatches_of(engine, *call), token_loss(name, config), counts=UNDIVIDED)[0]
        for call in CALLS
    )
    return loss, engine.optimizer_step(settings).grad_norm


def weights_of(engine: Engine) -> dict[str, Tensor]:
    layout = engine.handle.layout
    return {n: gather_whole(p, layout).clone() for n, p in engine.handle.named_parameters() if p.requires_grad}


def train(folder: Path, parallel: ParallelConfig) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    engine = make_engine(folder, parallel)
    return [train_step(engine, step) for step in range(len(STEPS))], weights_of(engine)


def plain_loss(name: str, config: dict[str, float], logprobs: Tensor, values: dict[str, Tensor]) -> Tensor:
    """The formulas, written a second time."""
    if name == "cross_entropy":
        return -(values["weights"] * logprobs).sum()
    advantages, ratio = values["advantages"], torch.exp(logprobs - values["logprobs"])
    match name:
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo":
            bounded = torch.clip(ratio, config["clip_low_threshold"], 1.2)
            return torch.maximum(-ratio * advantages, -bounded * advantages).sum()
        case "cispo":
            return -(torch.clip(ratio, 0, config["clip_high_threshold"]).detach() * logprobs * advantages).sum()
    gap = logprobs - values["logprobs"]
    return (-(logprobs * advantages) + 0.5 * config["beta"] * gap * gap).sum()


def train_plainly(folder: Path) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest}])
    results = []
    for (name, config), settings in STEPS:
        total = 0.0
        for sequence in (s for call in CALLS for s in sequences_of(*call)):
            logits = model(sequence.input_ids[None]).logits[0, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, sequence.input_ids[1:, None])[:, 0]
            loss = plain_loss(name, config, logprobs, {n: v[1:] for n, v in sequence.values.items()})
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or float("inf"))
        for group, decay in zip(optimizer.param_groups, (settings.weight_decay, 0.0), strict=True):
            group.update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)
        optimizer.step()
        optimizer.zero_grad()
        results.append((total, norm.item()))
    return results, dict(model.named_parameters())


@pytest.mark.parametrize(
    ("sizes", "tied"),
    [({}, False), ({"pp": 2}, True), ({"tp": 2}, False), ({"cp": 2}, False), ({"dp_shard": 2}, True)],
    ids=["one", "pp2 tied", "tp2", "cp2", "dp2 tied"],
)
def test_several_calls_and_one_optimizer_step_are_those_of_plain_transformers(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, int], tied: bool
) -> None:
    save_tiny_model(tmp_path, tied=tied, num_layers=2)
    expected, right = train_plainly(tmp_path)
    parallel = ParallelConfig(**sizes)
    of_ranks = ranks(parallel.world_size).run(train, tmp_path, parallel)
    for found, weights in of_ranks:
        for pair, expected_pair in zip(found, expected, strict=True):
            assert pair == pytest.approx(expected_pair, rel=1e-9)
        for name, weight in weights.items():
            assert (weight - right[name]).abs().max() < 1e-9, name
    assert {name for _, weights in of_ranks for name in weights} == right.keys()


def take_turns(folder: Path, lora: LoraConfig | None) -> None:
    """Two trainings on one model, switched in the middle of steps, against each on its own."""
    alone = []
    for first in (0, 2):
        engine = make_engine(folder, ParallelConfig(pp=2), lora)
        losses = [train_step(engine, first + step) for step in range(3)]
        alone.append((losses, weights_of(engine)))
    engine = make_engine(folder, ParallelConfig(pp=2), lora)
    states = [engine.snapshot_state(), engine.snapshot_state()]
    losses: list[list[tuple[float, float]]] = [[], []]
    for step in range(3):
        totals = [0.0, 0.0]
        for call in CALLS:
            for who, first in enumerate((0, 2)):
                engine.restore_state(states[who])
                (name, config), _ = STEPS[(first + step) % len(STEPS)]
                loss, _ = engine.forward_backward(
                    microbatches_of(engine, *call), token_loss(name, config), counts=UNDIVIDED
                )
                totals[who] += loss
                states[who] = engine.snapshot_state()
        for who, first in enumerate((0, 2)):
            engine.restore_state(states[who])
            norm = engine.optimizer_step(STEPS[(first + step) % len(STEPS)][1]).grad_norm
            losses[who].append((totals[who], norm))
            states[who] = engine.snapshot_state()
    for who in (0, 1):
        engine.restore_state(states[who])
        assert losses[who] == alone[who][0]
        assert engine.step == 3
        assert all(torch.equal(weight, alone[who][1][name]) for name, weight in weights_of(engine).items())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all weights", "lora"])
def test_trainings_that_take_turns_are_those_that_are_alone(
    ranks: RankPool, tmp_path: Path, lora: LoraConfig | None
) -> None:
    save_tiny_model(tmp_path, tied=lora is None, num_layers=2)
    ranks(2).run(take_turns, tmp_path, lora)


def without_gradients(folder: Path) -> None:
    engine = make_engine(folder, ParallelConfig(pp=2))
    before = weights_of(engine)
    microbatches = microbatches_of(engine, *CALLS[0])
    loss = token_loss("cross_entropy", {})
    engine.forward_backward(microbatches, loss, counts=UNDIVIDED)
    with pytest.raises(MicrobatchError):
        engine.forward_backward(microbatches, lambda *_: 1 / 0, counts=UNDIVIDED)
    assert engine.optimizer_step(AdamWSettings(1.0)).nothing_to_train
    engine.forward_backward(microbatches, loss, counts=UNDIVIDED)
    engine.zero_grad()
    step = engine.optimizer_step(AdamWSettings(1.0))
    assert step.skipped
    assert step.nothing_to_train
    assert engine.step == 2
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())


def test_a_failure_or_zero_grad_leaves_no_gradient(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    ranks(2).run(without_gradients, tmp_path)
