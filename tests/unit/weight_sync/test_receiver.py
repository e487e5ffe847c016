"""The generator's side: what is agreed, what is written, and when it has weights."""

import pytest
import torch
from torch import Tensor

from automodel_rl.errors import WeightSyncError
from automodel_rl.hf.buckets import Bucket, Chunk, Plan, TensorSpec
from automodel_rl.weight_sync.receiver import Receiver, in_turn
from tests.weights import plan_of, receive


def make_tensors() -> dict[str, Tensor]:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def make_receiver() -> Receiver:
    return Receiver({name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(3, 2)}, r"the trainer sends a \[3, 2\] float32, but the generator's is \[2, 3\] float32"),
        ({"b": torch.zeros(4)}, r"the trainer sends b \[4\] float32, but the generator's is \[4\] bfloat16"),
        ({"c": torch.zeros(1)}, r"the trainer sends c \[1\] float32, which the generator does not have"),
        ({"b": None}, "the trainer does not send b and 0 more tensors of the generator"),
    ],
)
def test_names_shapes_and_dtypes_are_agreed_before_anything_is_sent(
    change: dict[str, Tensor | None], message: str
) -> None:
    tensors = {name: tensor for name, tensor in {**make_tensors(), **change}.items() if tensor is not None}
    with pytest.raises(WeightSyncError, match=message):
        make_receiver().agree([plan_of(tensors)])


def test_a_tensor_that_two_senders_send_is_refused() -> None:
    plan = plan_of(make_tensors())
    with pytest.raises(WeightSyncError, match="sends 2 tensors twice"):
        make_receiver().agree([plan, plan])


def test_a_tensor_in_stretches_and_an_empty_bucket() -> None:
    tensor = torch.arange(10.0)
    receiver = Receiver({"a": torch.full((10,), -1.0)})
    spec = TensorSpec("a", (10,), torch.float32)
    buckets = (
        Bucket(torch.float32, 4, (Chunk(0, 6, 4, 0),)),
        Bucket(torch.float32, 0, ()),
        Bucket(torch.float32, 6, (Chunk(0, 3, 3, 0), Chunk(0, 0, 3, 3))),
    )
    receiver.agree([Plan((spec,), buckets)])
    receiver.begin()
    receiver.load(0, 0, tensor[6:].view(torch.uint8))
    receiver.load(0, 1, torch.zeros(8, dtype=torch.uint8))
    receiver.load(0, 2, torch.cat([tensor[3:6], tensor[:3], torch.zeros(5)]).view(torch.uint8))  # longer than filled
    assert torch.equal(receiver.homes["a"], tensor)


def test_between_begin_and_commit_there_is_no_version() -> None:
    receiver = make_receiver()
    with pytest.raises(WeightSyncError, match="no complete weights"):
        receiver.complete_version()
    receive(receiver, make_tensors(), version=7)
    assert receiver.complete_version() == 7
    receiver.begin()
    with pytest.raises(WeightSyncError, match="a weight sync was interrupted"):
        receiver.complete_version()


def test_senders_take_turns_until_the_last_has_nothing_left() -> None:
    plans = [Plan((), (Bucket(torch.float32, 0, ()),) * count) for count in (1, 3, 0)]
    assert in_turn(plans, frozen=True) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert in_turn([], frozen=True) == []


def test_buckets_of_frozen_tensors_keep_their_numbers_and_are_left_out_if_asked() -> None:
    trained, frozen = (Bucket(torch.float32, 0, (), is_frozen=is_frozen) for is_frozen in (False, True))
    plans = [Plan((), (frozen, trained, frozen)), Plan((), (frozen,)), Plan((), (trained,))]
    assert in_turn(plans, frozen=False) == [(0, 1), (2, 0)]
    assert len(in_turn(plans, frozen=True)) == 5
