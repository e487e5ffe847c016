"""An encoder on a rank of its own works while the language model does, in the order and time that paper says."""

import dataclasses
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import MediaTokens, Microbatch, TokenSequence, pack_microbatch
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig, one_layout
from automodel_rl.encoder.encoding import Encoding
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError, PeerError
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.pipeline.timeline import encoded_ahead, simulate
from automodel_rl.tools.verify.comparison import make_sequences
from automodel_rl.tools.verify.media import with_media
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_multimodal_model

APART = ComponentsConfig.model_validate({"vision": {"ranks": 0}, "language": {"ranks": 1}})
INTERLEAVED = ComponentsConfig.model_validate(
    {
        "vision": {"ranks": 0},
        "language": {"ranks": "1-2", "pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2},
    }
)
PIPELINE = ComponentsConfig.model_validate({"vision": {"ranks": 0}, "language": {"ranks": "1-2", "pp": 2}})
MICROBATCHES = 10
ENCODER, LANGUAGE = 0.05, 0.08
"""Seconds of a microbatch's forward; a backward takes twice as long. Long next to what a tiny model computes."""


Interval = tuple[float, float]
SLEPT: list[Interval] = []
"""When this process slept, on the clock that all processes of the machine share."""


def sleep(seconds: float) -> None:
    start = time.monotonic()
    time.sleep(seconds)
    SLEPT.append((start, time.monotonic()))


class Sleep(torch.autograd.Function):
    """The same tensor, after a while."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        sleep(seconds)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sleep(2 * ctx.seconds)
        return gradients[0], None


def make_engine(folder: Path, components: ComponentsConfig | None) -> Engine:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64"), components=components)
    return Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))


def microbatches_of(engine: Engine) -> list[Microbatch]:
    """As many microbatches with an image each; none for an outsider."""
    handle = engine.handle
    sequences: list[TokenSequence] = make_sequences(MICROBATCHES, 0, handle.config.vocab_size)
    return (
        []
        if handle.layout.is_outsider
        else [pack_microbatch([with_media(s, handle.whole_config, 1)]) for s in sequences]
    )


def intervals_of_a_step(folder: Path, components: ComponentsConfig) -> list[Interval]:
    """When this rank's layers, which sleep in place of work, were busy in a step."""
    engine = make_engine(folder, components)
    microbatches = microbatches_of(engine)
    put_into, forward, backward = MediaTokens.put_into, Encoding.forward, Encoding.backward

    def slow_put_into(tokens: MediaTokens, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden, features = put_into(tokens, hidden)
        return Sleep.apply(hidden, LANGUAGE), features

    def slow_forward(*arguments: Any) -> Tensor:
        sleep(ENCODER)
        return forward(*arguments)

    def slow_backward(*arguments: Any, **keywords: Any) -> None:
        sleep(2 * ENCODER)
        backward(*arguments, **keywords)

    engine.train_step(microbatches, sft_loss)
    SLEPT.clear()
    with (
        mock.patch.object(MediaTokens, "put_into", slow_put_into),
        mock.patch.object(Encoding, "forward", slow_forward),
        mock.patch.object(Encoding, "backward", slow_backward),
    ):
        engine.train_step(microbatches, sft_loss)
    return [*SLEPT]


def covered(intervals: list[Interval]) -> float:
    """Seconds that lie within at least one interval."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def test_encoder_and_language_model_work_at_the_same_time_as_paper_says(ranks: RankPool, tmp_path: Path) -> None:
    """What counts is the time in which either works. In turn the quotient would be 1; a machine's other work keeps it
    below that of paper."""
    save_tiny_multimodal_model(tmp_path)
    encoder, language = ranks(2).run(intervals_of_a_step, tmp_path, APART)
    assert len(encoder) == len(language) == 2 * MICROBATCHES
    work = covered(encoder) + covered(language)
    paper = simulate(ParallelConfig(), MICROBATCHES, [LANGUAGE], [1.0], ENCODER).length
    assert work / covered([*encoder, *language]) > 1.15
    assert 3 * MICROBATCHES * (ENCODER + LANGUAGE) / paper > 1.5


def events_of_a_step(folder: Path, components: ComponentsConfig) -> list[str]:
    """What the rank with the encoder does: E of a microbatch's images, and B of their backward."""
    engine = make_engine(folder, components)
    events: list[str] = []
    forward, backward = Encoding.forward, Encoding.backward

    def noted_forward(*arguments: Any) -> Tensor:
        events.append("E")
        return forward(*arguments)

    def noted_backward(*arguments: Any, **keywords: Any) -> None:
        events.append("B")
        backward(*arguments, **keywords)

    with (
        mock.patch.object(Encoding, "forward", noted_forward),
        mock.patch.object(Encoding, "backward", noted_backward),
    ):
        engine.train_step(microbatches_of(engine), sft_loss)
    return events


@pytest.mark.parametrize("components", [APART, PIPELINE], ids=str)
def test_no_more_images_are_kept_than_the_pipeline_needs(
    ranks: RankPool, tmp_path: Path, components: ComponentsConfig
) -> None:
    save_tiny_multimodal_model(tmp_path)
    of_ranks = ranks(components.world_size).run(events_of_a_step, tmp_path, components)
    ahead = encoded_ahead(components.language.parallel, MICROBATCHES)
    assert ahead == components.language.pp + 1
    assert of_ranks[0] == ["E"] * ahead + ["B", "E"] * (MICROBATCHES - ahead) + ["B"] * ahead


def test_ranks_of_later_stages_wait_for_no_encoder(ranks: RankPool, tmp_path: Path) -> None:
    """They know of no microbatch with images, under schedules whose plan depends on the number of them."""
    save_tiny_multimodal_model(tmp_path)
    found = ranks(INTERLEAVED.world_size).run(losses_of_two_steps, tmp_path, INTERLEAVED)
    expected = ranks(PIPELINE.world_size).run(losses_of_two_steps, tmp_path, PIPELINE)
    assert found[0] == pytest.approx(expected[0], rel=1e-9)


def losses_of_two_steps(folder: Path, components: ComponentsConfig) -> list[float]:
    engine = make_engine(folder, components)
    return [engine.train_step(microbatches_of(engine), sft_loss).loss for _ in range(2)]


def late_image(folder: Path, components: ComponentsConfig) -> tuple[float, float]:
    """Of two encoder data ranks, the second has an image only in the last microbatch: it joins the first's
    collectives."""
    engine = make_engine(folder, components)
    handle, microbatches = engine.handle, []
    for number in range(0 if handle.layout.is_outsider else 6):
        (sequence,) = make_sequences(1, number, handle.config.vocab_size)
        has_image = handle.layout.data_rank == 0 or number == 5
        microbatches.append(pack_microbatch([with_media(sequence, handle.whole_config, int(has_image))]))
    output = engine.train_step(microbatches, sft_loss)
    return output.loss, output.grad_norm


def test_a_rank_whose_images_come_late_keeps_nobody_waiting(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path)
    components = ComponentsConfig.model_validate(
        {"vision": {"ranks": "0-1", "dp_shard": 2}, "language": {"ranks": "2-3", "dp_shard": 2}}
    )
    found = ranks(components.world_size).run(late_image, tmp_path, components)
    assert len(set(found)) == 1
    assert found[0][1] > 0


def damaged() -> Tensor:
    raise InputError("chats.jsonl:7: cannot read the image half.jpg")


def train_on_a_damaged_image(folder: Path, components: ComponentsConfig) -> tuple[str, str, float]:
    """What a step with a damaged image raises, what log-probabilities raise, and the loss of a whole one after them."""
    engine, found = make_engine(folder, components), []
    whole = microbatches_of(engine)
    broken = [
        dataclasses.replace(microbatch, media=(dataclasses.replace(microbatch.media[0], pixels=damaged),))
        for microbatch in whole
    ]
    for work in (lambda: engine.train_step(broken, sft_loss), lambda: engine.logprobs(broken)):
        try:
            work()
        except (InputError, PeerError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found[0], found[1], engine.train_step(whole, sft_loss).loss


@pytest.mark.parametrize("place", ["alongside", "in turn"])
def test_a_damaged_image_keeps_nobody_waiting(ranks: RankPool, tmp_path: Path, place: str) -> None:
    save_tiny_multimodal_model(tmp_path)
    layouts = {"alongside": APART, "in turn": one_layout(ParallelConfig(pp=2), ["vision"])}
    found = ranks(layouts[place].world_size).run(train_on_a_damaged_image, tmp_path, layouts[place])
    errors = {message for trained, evaluated, _ in found for message in (trained, evaluated)}
    assert "InputError: chats.jsonl:7: cannot read the image half.jpg" in errors
    assert all("half.jpg" in message for message in errors)
    assert len({loss for *_, loss in found}) == 1
