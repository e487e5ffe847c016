"""Images in microbatches: where their tokens are, and how the language model turns them."""

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5OmniThinkerConfig
from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Thinker
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from automodel_rl.batch import (
    Audio,
    Image,
    Media,
    RotaryGrid,
    TokenSequence,
    Video,
    distinct_media,
    local_microbatch,
    multimodal_positions,
    pack_microbatch,
)
from automodel_rl.batch.media import media_places

IMAGE, VIDEO, START, END = 9, 8, 7, 6


def sequence_of(texts: list[int], sides: list[tuple[int, ...]]) -> TokenSequence:
    """Texts of so many tokens with images of (height, width) tokens, or videos of (time, height, width), between."""
    ids: list[int] = []
    media: list[Media] = []
    for number, length in enumerate(texts):
        ids += [1] * length
        if number:
            ids[-length] = END
        if number < len(sides):
            ids[-1] = START
            *time, height, width = sides[number]
            grid = (time[0] if time else 1, 2 * height, 2 * width)
            count = grid[0] * height * width
            if time:
                media.append(Video(len(ids), count, grid, torch.zeros(0), interval=25 * 2 / 3 * (1 + number)))
            else:
                media.append(Image(len(ids), count, grid, torch.zeros(0)))
            ids += [VIDEO if time else IMAGE] * count
    return TokenSequence(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), media=tuple(media))


def expected_positions(family: str, sequence: TokenSequence) -> torch.Tensor:
    """The positions that transformers gives a sequence."""
    special = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    videos = [item for item in sequence.media if isinstance(item, Video)]
    images = [item for item in sequence.media if isinstance(item, Image) and not isinstance(item, Video)]
    grids = [torch.tensor([item.grid for item in items]) if items else None for items in (images, videos)]
    seconds = torch.tensor([item.interval / 25 for item in videos])
    stub = torch.nn.Module()
    if family == "qwen2_5_vl":
        stub.config = Qwen2_5_VLConfig(vision_config={"tokens_per_second": 25}, **special)
        stub.get_vision_position_ids = lambda *a, **k: Qwen2_5_VLModel.get_vision_position_ids(None, *a, **k)
        kinds = (sequence.input_ids == IMAGE).int() + 2 * (sequence.input_ids == VIDEO).int()
        return Qwen2_5_VLModel.get_rope_index(stub, sequence.input_ids[None], kinds[None], *grids, seconds)[0][:, 0]
    stub.config = Qwen2_5OmniThinkerConfig(**{key.replace("token_id", "token_index"): i for key, i in special.items()})
    stub.config.vision_start_token_id = START
    stub.spatial_merge_size = 2
    stub.get_llm_pos_ids_for_vision = lambda *a: Thinker.get_llm_pos_ids_for_vision(None, *a)
    ids = sequence.input_ids[None]
    return Thinker.get_rope_index(stub, ids, *grids, torch.ones_like(ids), second_per_grids=seconds)[0][:, 0]


@pytest.mark.parametrize(("family", "follows"), [("qwen2_5_vl", False), ("qwen2_5_omni_thinker", True)])
def test_positions_are_those_of_transformers(family: str, follows: bool) -> None:
    generator = np.random.default_rng(0)
    sequences = []
    for _ in range(20):
        count = int(generator.integers(0, 4))
        texts = [int(n) for n in generator.integers(2, 6, count + 1)]
        sides = [tuple(generator.integers(1, 5, int(generator.integers(2, 4))).tolist()) for _ in range(count)]
        sequences.append(sequence_of(texts, sides))
    microbatch = pack_microbatch(sequences)
    positions = multimodal_positions(microbatch.media, microbatch.lengths, RotaryGrid(2, follows))
    for sequence, piece in zip(sequences, positions.split(microbatch.lengths, dim=1), strict=True):
        expected = torch.arange(len(sequence)).expand(3, -1)
        assert torch.equal(piece, expected_positions(family, sequence) if sequence.media else expected)


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
    with pytest.raises(ValueError, match="images and clips must lie within the sequence, in order and without overlap"):
        TokenSequence(torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.bool), media=placed)


def test_media_with_the_same_content_are_encoded_once_and_no_others() -> None:
    """Of one file there may be several sizes, an image and a clip, and what has no file is like nothing else."""
    nothing = torch.zeros(0)
    media: list[Media] = [
        Image(1, 2, (1, 2, 4), nothing, "a.png"),
        Image(4, 4, (1, 4, 4), nothing, "a.png"),  # the same file, larger
        Audio(9, 2, 8, nothing, "a.png"),
        Image(12, 2, (1, 2, 4), nothing, "a.png"),  # as the first
        Image(15, 2, (1, 2, 4), nothing),
        Image(18, 2, (1, 2, 4), nothing),
        Image(21, 2, (1, 2, 4), nothing, "b.png"),
        Audio(24, 3, 12, nothing, "a.png"),  # another stretch of the clip
        Image(28, 2, (1, 4, 2), nothing, "a.png"),  # turned
    ]
    distinct = [0, 1, 4, 5, 6, 8, 2, 7]
    pictures, clips = distinct_media(media, "vision"), distinct_media(media, "audio")
    assert [media.index(item) if item.source else None for item in pictures] == [0, 1, None, None, 6, 8]
    assert [item.start for item in (*pictures, *clips)] == [media[number].start for number in distinct]
    starts = dict(zip(distinct, np.cumsum([0, *(media[number].num_tokens for number in distinct)]), strict=False))
    starts[3] = starts[0]
    expected = np.full(32, -1)
    for number, item in enumerate(media):
        expected[item.start : item.start + item.num_tokens] = starts[number] + np.arange(item.num_tokens)
    assert media_places(media, 32).tolist() == expected.tolist()
