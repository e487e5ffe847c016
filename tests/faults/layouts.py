"""Bugs of pipelines, and of encoders on ranks of their own."""

import copy
import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests.faults.fault import Fault, Verified, patch


def _buffers_by_shape() -> Any:
    """Messages of microbatches of equal shape share a buffer."""
    from automodel_rl.compat.pipelining import PackedStage

    bind, receive = PackedStage.bind, PackedStage._receive
    buffers: dict[Any, Any] = {}

    def anew(stage: PackedStage, *args: Any) -> None:
        buffers.clear()
        bind(stage, *args)

    def shared(stage: PackedStage, name: str, source: int, shape: Any, *args: Any) -> Any:
        key = stage.stage_index, name, tuple(shape)
        if key not in buffers:
            buffers[key] = receive(stage, name, source, shape, *args)
        return buffers[key]

    return mock.patch.multiple(PackedStage, bind=anew, _receive=shared)


def _swap_of_one_part() -> Any:
    from automodel_rl.engine.reference_weights import ReferenceWeights

    class OnePart(ReferenceWeights):
        def __init__(self, handle: Any):
            first = copy.copy(handle)
            first.parts = handle.parts[:1]
            super().__init__(first)

    return patch("tools.verify.comparison.ReferenceWeights", OnePart)


def _mean_over_two(where: str) -> Any:
    """Gradients of one component are averaged by FSDP."""
    from automodel_rl.parallel.sharding import wrap_fsdp

    def averaging(units: Any, **options: Any) -> None:
        wrap_fsdp(units := [*units], **options)
        for module in units[-1].module.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)

    return patch(f"{where}.wrap_fsdp", averaging)


def _clip_by_component() -> Any:
    """Each mesh clips its gradients by their own norm."""

    def clip(parameters: list, most: float, _: Tensor, foreach: bool | None = None) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, most)

    return mock.patch("torch.nn.utils.clip_grads_with_norm_", clip)


def _embeddings_off_by_one() -> Any:
    from automodel_rl.batch import MediaTokens

    put_into = MediaTokens.put_into

    def off(tokens: MediaTokens, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        assert tokens.embeddings is not None
        rolled = tokens.embeddings().roll(1, 0)
        return put_into(dataclasses.replace(tokens, embeddings=lambda: rolled), hidden)

    return mock.patch.object(MediaTokens, "put_into", off)


def _features_at_another_layer() -> Any:
    from automodel_rl.batch import MediaTokens

    put_into = MediaTokens.put_into

    def turned(tokens: MediaTokens, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden, features = put_into(tokens, hidden)
        return hidden, features[::-1]

    return mock.patch.object(MediaTokens, "put_into", turned)


def _shared_image_twice() -> Any:
    from automodel_rl.batch import MediaTokens

    put_into = MediaTokens.put_into

    def twice(tokens: MediaTokens, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        assert tokens.embeddings is not None
        known = tokens.embeddings()
        is_shared = tokens.rows.bincount(minlength=len(known)) > 1
        doubled = known + (known - known.detach()) * is_shared[:, None]
        return put_into(dataclasses.replace(tokens, embeddings=lambda: doubled), hidden)

    return mock.patch.object(MediaTokens, "put_into", twice)


def _encoders_in_another_order() -> Any:
    """Embeddings of audio stand before those of images."""

    def joined(embeddings: Any) -> Tensor:
        return torch.cat([of_encoder() for of_encoder in reversed(list(embeddings))])

    return patch("encoder.media_encoders._joined", joined)


def _silence_heard() -> Any:
    """The frames that fill up a clip are heard like its own."""
    from automodel_rl.families.qwen2_audio import AudioWindows

    encode = AudioWindows.encode

    def hearing_all(family: AudioWindows, model: Any, config: Any, loaded: Any, media: Any) -> Tensor:
        longer = [dataclasses.replace(item, num_frames=loaded[0].shape[1]) for item in media]
        return encode(family, model, config, loaded, longer)

    return mock.patch.object(AudioWindows, "encode", hearing_all)


def _videos_without_seconds() -> Any:
    """Positions in time of a video rise by one."""
    from automodel_rl.batch import Video
    from automodel_rl.step.local_microbatches import multimodal_positions

    def by_one(media: Any, *arguments: Any) -> Tensor:
        still = [dataclasses.replace(item, interval=1.0) if isinstance(item, Video) else item for item in media]
        return multimodal_positions(still, *arguments)

    return patch("step.local_microbatches.multimodal_positions", by_one)


def _images_seen_one_way() -> Any:
    return patch("batch.local_microbatch._image_call", lambda *_: None)


def _images_seen_both_ways_without_windows() -> Any:
    from automodel_rl.batch.local_microbatch import _image_call

    def in_all_layers(*arguments: Any) -> Any:
        call = _image_call(*arguments)
        return None if call is None else dataclasses.replace(call, only_windows=False)

    return patch("batch.local_microbatch._image_call", in_all_layers)


def _window_from_the_last_own_token() -> Any:
    """Queries of an image that ends on another rank see as if their last one were the image's last."""
    from automodel_rl.batch.local_microbatch import _image_call

    def without_the_rest(*arguments: Any) -> Any:
        call = _image_call(*arguments)
        if call is None or call.counted is None:
            return call
        ends = torch.tensor(call.query_lengths).cumsum(0)
        own = [
            int(((call.counted < end) & (call.counted >= end - n)).sum())
            for end, n in zip(ends, call.query_lengths, strict=True)
        ]
        starts = torch.tensor([0, *own]).cumsum(0).int()
        return dataclasses.replace(
            call, queries=call.queries[call.counted], counted=None, cu_queries=starts, query_lengths=tuple(own)
        )

    return patch("batch.local_microbatch._image_call", without_the_rest)


INTERLEAVED = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
ENCODERS = {"vision": {"ranks": "0-1", "dp_shard": 2}, "language": {"ranks": 2}}
PIPELINED_READERS = {"vision": {"ranks": 0}, "language": {"ranks": "1-2", "pp": 2}}
READERS = {"vision": {"ranks": 0}, "language": {"ranks": "1-2", "dp_shard": 2}}
HEARERS = {"audio": {"ranks": 0}, "language": {"ranks": "1-2", "dp_shard": 2}}
OMNI = {"vision": {"ranks": 0}, "audio": {"ranks": 1}, "language": {"ranks": 2}}
CUT_READERS = {"vision": {"ranks": 0}, "language": {"ranks": "1-2", "cp": 2}}

FAULTS: dict[str, Fault] = {
    "receive buffers shared by equal shapes (interleaved)": Fault(_buffers_by_shape, Verified("qwen3", INTERLEAVED)),
    "receive buffers shared by equal shapes (zero bubble)": Fault(
        _buffers_by_shape,
        Verified("qwen3", {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}, case={"microbatches": (3, 9)}),
    ),
    "reference swap of one part": Fault(_swap_of_one_part, Verified("qwen3", INTERLEAVED)),
    "mean over encoder ranks": Fault(lambda: _mean_over_two("model.encoder"), Verified("llava", components=ENCODERS)),
    "mean over ranks of the language model": Fault(
        lambda: _mean_over_two("model.parallelise"), Verified("llava", components=READERS)
    ),
    "clipping by module": Fault(_clip_by_component, Verified("llava", components=READERS)),
    "embeddings off by one": Fault(_embeddings_off_by_one, Verified("llava", components=READERS)),
    "features of images at another layer": Fault(
        _features_at_another_layer, Verified("qwen3_vl", components=PIPELINED_READERS)
    ),
    "images seen one way": Fault(_images_seen_one_way, Verified("gemma3", components=READERS)),
    "images seen both ways in layers without windows": Fault(
        _images_seen_both_ways_without_windows, Verified("gemma4", components=READERS)
    ),
    "embeddings of layers for tokens of images": Fault(
        lambda: patch("model.parallelise.padded_ids", lambda _: ()),
        "distributed/model/test_gemma4.py::test_small_models_see_images_as_one_process",
    ),
    "windows of an image from its last token on a rank": Fault(
        _window_from_the_last_own_token, Verified("gemma3", components=CUT_READERS)
    ),
    "embeddings of two encoders in another order": Fault(
        _encoders_in_another_order, Verified("qwen2_5_omni_thinker", components=OMNI)
    ),
    "silence heard like a clip": Fault(_silence_heard, Verified("qwen2_audio", components=HEARERS)),
    "videos without seconds": Fault(_videos_without_seconds, Verified("qwen2_5_vl", components=READERS)),
    "gradient of a shared image counted twice": Fault(_shared_image_twice, Verified("llava", components=READERS)),
}
