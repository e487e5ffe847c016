"""Images in microbatches: where their tokens are, and how the language model turns them."""

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from automodel_rl.batch import Image, TokenSequence, local_microbatch, multimodal_positions, pack_microbatch

IMAGE = 9


def sequence_of(texts: list[int], sides: list[tuple[int, int]]) -> TokenSequence:
    """Texts of so many tokens with images of (height, width) tokens between them."""
    ids: list[int] = []
    images = []
    for number, length in enumerate(texts):
        ids += [1] * length
        if number < len(sides):
            height, width = sides[number]
            images.append(Image(len(ids), height * width, (1, 2 * height, 2 * width), torch.zeros(0)))
            ids += [IMAGE] * (height * width)
    return TokenSequence(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), media=tuple(images))


def test_positions_are_those_of_transformers() -> None:
    config = Qwen2_5_VLConfig(image_token_id=IMAGE)
    generator = np.random.default_rng(0)
    sequences = []
    for _ in range(20):
        count = int(generator.integers(0, 3))
        texts = [int(n) for n in generator.integers(1, 6, count + 1)]
        sequences.append(sequence_of(texts, [tuple(generator.integers(1, 5, 2).tolist()) for _ in range(count)]))
    microbatch = pack_microbatch(sequences)
    pieces = multimodal_positions(microbatch.media, microbatch.lengths, merge=2).split(microbatch.lengths, dim=1)
    for sequence, piece in zip(sequences, pieces, strict=True):
        expected = torch.arange(len(sequence)).expand(3, -1)
        if sequence.media:
            kinds = (sequence.input_ids == IMAGE).int()[None]
            grids = torch.tensor([image.grid for image in sequence.media])
            stub = torch.nn.Module()
            stub.config = config
            stub.get_vision_position_ids = lambda *a, **k: Qwen2_5_VLModel.get_vision_position_ids(None, *a, **k)
            expected = Qwen2_5_VLModel.get_rope_index(stub, sequence.input_ids[None], kinds, grids)[0][:, 0]
        assert torch.equal(piece, expected)


@pytest.mark.parametrize("cp", [1, 2])
def test_every_image_token_gets_its_own_embedding_on_some_rank(cp: int) -> None:
    microbatch = pack_microbatch([sequence_of([2, 3], [(1, 3)]), sequence_of([4], []), sequence_of([1, 2], [(2, 2)])])
    num_embeddings = sum(image.num_tokens for image in microbatch.media)
    seen = []
    for rank in range(cp):
        part = local_microbatch(microbatch, cp, rank)
        assert (part.input_ids[part.media.places] == IMAGE).all()
        seen += part.media.rows.tolist()
    assert sorted(seen) == list(range(num_embeddings))


@pytest.mark.parametrize("images", [((4, 3),), ((0, 2), (1, 2)), ((3, 0),)])
def test_images_that_overlap_or_lie_outside_are_refused(images: tuple[tuple[int, int], ...]) -> None:
    placed = tuple(Image(start, count, (1, 1, 1), torch.zeros(0)) for start, count in images)
    with pytest.raises(ValueError, match="images and clips lie within the sequence, in order and apart"):
        TokenSequence(torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.bool), media=placed)
