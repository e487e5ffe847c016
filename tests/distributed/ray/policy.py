"""A program that trains a policy on a Ray cluster, and compares it with an engine of its own process."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_rl.batch import Batch, TokenSequence, pack
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.ray import PolicyGroup, PolicyLostError
from tests.distributed.ray.failing_loss import fail
from tests.distributed.trainers.runs import settings_of
from tests.tiny import make_sequences

NUMBERS = {"rtol": 0.0, "atol": 1e-9}


def main() -> None:
    address, workspace, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    settings = settings_of("grpo", workspace, folder / "run")
    alone = GRPOConfig.model_validate(settings)
    launch = {"ray": {"address": address, "ranks_per_node": 1}}
    config = GRPOConfig.model_validate(settings | {"parallel": {"dp_shard": 2}, "launch": launch})
    engine = Engine(ModelHandle.from_pretrained(alone.model, alone.parallel), alone.optimizer)
    sequences = make_sequences(7, 0)
    packed, batch = pack(sequences, alone.batch.capacity), Batch(sequences)
    with PolicyGroup(config) as policy:
        before = policy.fleet.write(_requests())
        assert policy.fleet.write(_requests()) == before
        for _ in range(2):
            expected, found = engine.train_step(packed, sft_loss), policy.train_step(batch, sft_loss)
            torch.testing.assert_close(found.loss, expected.loss, **NUMBERS)
            torch.testing.assert_close(found.grad_norm, expected.grad_norm, **NUMBERS)
        engine.forward_backward(packed, sft_loss)
        policy.forward_backward(batch, sft_loss)
        torch.testing.assert_close(policy.optimizer_step().grad_norm, engine.optimizer_step().grad_norm, **NUMBERS)
        _compare_logprobs(policy, engine, packed, sequences)
        assert policy.fleet.write(_requests()) == before, "generators have the weights of the last sync"
        policy.fleet.sync()
        assert policy.fleet.policy_version == 2
        assert policy.fleet.write(_requests()) != before
        policy.save(folder / "saved")
        engine.handle.save_pretrained(folder / "expected", None)
        _check_failures(policy)
    (one,), (other,) = [[*(folder / name).glob("*.safetensors")] for name in ("saved", "expected")]
    torch.testing.assert_close(load_file(one), load_file(other), **NUMBERS)


def _requests() -> list[Request]:
    return [Request([5, 6, 7 + number], seed=number, sampling=Sampling(6)) for number in range(5)]


def _compare_logprobs(policy: PolicyGroup, engine: Engine, packed: list, sequences: list[TokenSequence]) -> None:
    places = [place for microbatch in packed for place in microbatch.order]
    expected = dict(zip(places, engine.logprobs(packed), strict=True))
    for place, found in enumerate(policy.logprobs(Batch(sequences))):
        assert len(found) == len(sequences[place])
        torch.testing.assert_close(found, expected[place], **NUMBERS)


def _check_failures(policy: PolicyGroup) -> None:
    """Input that the ranks refuse leaves the group as it was. Any other failure ends it."""
    with pytest.raises(InputError):
        policy.train_step(Batch([TokenSequence(torch.tensor([1, 10_000]), torch.tensor([False, True]))]), sft_loss)
    policy.logprobs(Batch(make_sequences(3, 1)))
    with pytest.raises(PolicyLostError, match="planted"):
        policy.train_step(Batch(make_sequences(3, 1)), fail)
    with pytest.raises(PolicyLostError, match="closed"):
        policy.logprobs(Batch(make_sequences(3, 1)))
