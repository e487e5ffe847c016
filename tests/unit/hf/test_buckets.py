"""How tensors are placed in buckets: everything once, nothing beyond the size, tensors cut or whole."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MixtralConfig

from automodel_rl.config import ParallelConfig
from automodel_rl.families.known import checkpoint_family
from automodel_rl.hf.buckets import Source, StageBuckets, whole_tensors
from automodel_rl.launch.process_group import join_process_group, leave_process_group
from automodel_rl.parallel.layout import Layout, build_layout

LLAMA, MIXTRAL = checkpoint_family(LlamaConfig()), checkpoint_family(MixtralConfig())


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    yield build_layout(ParallelConfig(), join_process_group(1))
    leave_process_group()


def make_sources(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Source]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [
        Source(f"model.layers.{n}.weight", tensor, dtype, lambda tensor=tensor: tensor)
        for n, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True))
    ]


def unpacked(buckets: StageBuckets) -> list[torch.Tensor]:
    """What a receiver makes of all buckets; NaN where nothing was written, and an error where something was twice."""
    got = [torch.full(spec.shape, torch.nan, dtype=spec.dtype) for spec in buckets.plan.tensors]
    for number, bucket in enumerate(buckets.plan.buckets):
        buffer = torch.full((buckets.plan.largest_bucket,), 0xFF, dtype=torch.uint8)
        buckets.pack(number, buckets.targets(number, buffer))
        for chunk in bucket.chunks:
            home = got[chunk.tensor].view(-1)[chunk.start : chunk.start + chunk.count]
            assert home.isnan().all()
            home.copy_(bucket.elements(buffer)[chunk.offset : chunk.offset + chunk.count])
    return got


shapes = st.lists(st.lists(st.integers(1, 7), min_size=0, max_size=3), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, elements=st.integers(1, 40), whole=st.booleans(), data=st.data())
def test_every_element_is_sent_once_in_buckets_of_limited_size(
    layout: Layout, shapes: list[list[int]], elements: int, whole: bool, data: st.DataObject
) -> None:
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in shapes]
    sources = make_sources(shapes, dtypes)
    buckets = StageBuckets(sources, LLAMA, layout, 4 * elements, whole=whole)
    for source, got in zip(sources, unpacked(buckets), strict=True):
        assert torch.equal(source.tensor.to(source.dtype), got)
    for bucket in buckets.plan.buckets:
        assert bucket.numel == sum(chunk.count for chunk in bucket.chunks) > 0
        if whole:
            assert bucket.num_bytes <= 4 * elements or len(bucket.chunks) == 1
            assert all(chunk.count == buckets.plan.tensors[chunk.tensor].numel for chunk in bucket.chunks)
        else:
            assert bucket.num_bytes <= 4 * elements


def test_a_tensor_larger_than_a_buffer_takes_several(layout: Layout) -> None:
    (source,) = make_sources([(3, 5, 4)], [torch.float32])
    buckets = StageBuckets([source], LLAMA, layout, 4 * 8)
    assert [bucket.numel for bucket in buckets.plan.buckets] == [8] * 7 + [4]
    assert StageBuckets([source], LLAMA, layout, 4 * 8, whole=True).plan.largest_bucket == 4 * 60


def test_experts_are_sent_one_by_one_and_each_whole(layout: Layout) -> None:
    experts = torch.randn(4, 6, 2)
    source = Source("model.layers.0.mlp.experts.gate_up_proj", experts, torch.float32, lambda: experts)
    buckets = StageBuckets([source], MIXTRAL, layout, 4 * 2 * 12, whole=True)
    assert [bucket.numel for bucket in buckets.plan.buckets] == [24, 24]  # two experts at a time
    names = [spec.name for spec in buckets.plan.tensors]
    assert names[:3] == [f"model.layers.0.block_sparse_moe.experts.{name}.weight" for name in ("0.w1", "0.w3", "1.w1")]
    got = dict(zip(names, unpacked(buckets), strict=True))
    assert torch.equal(got["model.layers.0.block_sparse_moe.experts.3.w3.weight"], experts[3, 3:])


def test_new_sources_of_the_same_tensors_are_read_anew(layout: Layout) -> None:
    buckets = StageBuckets(make_sources([(4,)], [torch.float32]), LLAMA, layout, 8)
    unpacked(buckets)
    fresh = Source("model.layers.0.weight", torch.arange(4.0), torch.float32, lambda: torch.arange(4.0))
    buckets.reread([fresh])
    assert torch.equal(unpacked(buckets)[0], torch.arange(4.0))


def test_nothing_makes_no_buckets(layout: Layout, tmp_path: Path) -> None:
    assert StageBuckets([], LLAMA, layout, 8).plan.largest_bucket == 0
    assert list(whole_tensors([], LLAMA, layout)) == []
