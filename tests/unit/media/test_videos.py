"""Videos of chats: patches are laid out as by the model's own video processor, which needs torchvision, and what is
refused."""

import functools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture
from transformers import AutoTokenizer

from automodel_rl.config import SourceConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.media import MediaReaders, open_readers
from automodel_rl.data.media_files import with_media_files
from automodel_rl.data.messages import Chat
from automodel_rl.errors import InputError
from automodel_rl.families.encoder import ReadingOptions
from automodel_rl.hf.read import read_config
from automodel_rl.media.videos import Frames
from tests.vision import make_vision_workspace

PATCH, MERGE, PAIR = 4, 2, 2


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> MediaReaders:
    model = make_vision_workspace(tmp_path_factory.mktemp("videos"), "qwen2_5_vl", num_chats=1) / "model"
    found = open_readers(model, read_config(model))
    assert found is not None
    return found


def frames(folder: Path, count: int, size: tuple[int, int] = (16, 24)) -> tuple[str, ...]:
    rng = np.random.default_rng(count)
    paths = [folder / f"{number}.png" for number in range(count)]
    for path in paths:
        Picture.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(path)
    return tuple(map(str, paths))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_patches_are_those_of_the_models_video_processor(readers: MediaReaders, tmp_path: Path, count: int) -> None:
    paths = frames(tmp_path, count)
    video = readers.by_part_type["video"](Frames(paths, 2.0), "here")
    time = (count + 1) // 2
    assert video.size == (time, 4, 6)
    assert video.num_tokens == time * 2 * 3
    processor: Any = vars(readers.by_part_type["image"])["processor"]
    mean, std = (torch.tensor(values)[:, None, None] for values in (processor.image_mean, processor.image_std))
    pictures = [torch.from_numpy(np.array(Picture.open(path))).permute(2, 0, 1) for path in paths]
    pictures += pictures[-1:] * (count % 2)
    whole = torch.stack([(picture / 255 - mean) / std for picture in pictures])
    # Places of a patch: time, row and column of its token, its place there, then colour, frame, row and column.
    cut = whole.reshape(time, PAIR, 3, 4 // MERGE, MERGE, PATCH, 6 // MERGE, MERGE, PATCH)
    expected = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * 4 * 6, -1)
    torch.testing.assert_close(video.load(), expected, rtol=0, atol=1e-6)


def test_a_video_of_one_picture_is_its_image(readers: MediaReaders, tmp_path: Path) -> None:
    (path,) = frames(tmp_path, 1, (33, 50))
    image, video = (
        readers.by_part_type["image"](path, "here"),
        readers.by_part_type["video"](Frames((path, path), 1), "here"),
    )
    assert image.size == video.size
    assert torch.equal(image.load(), video.load())
    assert len(pickle.dumps(video)) < 4000


def test_positions_in_time_tell_seconds(readers: MediaReaders, tmp_path: Path) -> None:
    paths = frames(tmp_path, 4)
    video: Any = readers.by_part_type["video"](Frames(paths, 0.5), "here")
    assert video.interval == 4 * 4  # two frames are four seconds, of four positions each


def test_frames_of_other_sizes_are_refused(readers: MediaReaders, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    paths = (*frames(tmp_path, 1), *frames(tmp_path / "more", 1, (20, 20)))
    with pytest.raises(InputError, match=r"x:1: frames of a video have sizes \[\(16, 24\), \(20, 20\)\]"):
        readers.by_part_type["video"](Frames(paths, 2.0), "x:1")


def named(folder: Path, part: dict, **record: Any) -> Any:
    config = SourceConfig(path=str(folder / "data.jsonl"))
    (message,) = with_media_files([{"role": "user", "content": [part]}], record, config, "x:1")
    return message["content"][0]["path"]


def test_frames_are_named_in_the_part_or_in_a_column(tmp_path: Path) -> None:
    paths = frames(tmp_path, 2)
    names = [Path(path).name for path in paths]
    assert named(tmp_path, {"type": "video", "video": names, "fps": 4}) == Frames(paths, 4.0)
    assert named(tmp_path, {"type": "video"}, videos=[names]) == Frames(paths, 2.0)
    assert named(tmp_path, {"type": "video"}, videos=names) == Frames(paths, 2.0)
    assert named(tmp_path, {"type": "video"}, videos=[{"frames": names, "fps": 0.5}]) == Frames(paths, 0.5)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"video": "film.mp4"},
            "a part of type video has 'film.mp4' for frames: use a list of images",
        ),
        ({"video": ["none.png"]}, "no file .*none.png of type video"),
        (
            {"video": ["0.png"], "fps": 0},
            "a part of type video has fps 0: set it to the frames per second, a number above 0",
        ),
        ({}, "a part of type video has no file: name one in the part as path"),
    ],
)
def test_what_is_no_video_is_refused(tmp_path: Path, part: dict, message: str) -> None:
    frames(tmp_path, 1)
    with pytest.raises(InputError, match=f"x:1: {message}"):
        named(tmp_path, {"type": "video", **part})


@pytest.mark.parametrize("count", [3, 4])
def test_patches_in_time_of_qwen3_stand_after_their_seconds(tmp_path: Path, count: int) -> None:
    """As Qwen's processor writes them. That of transformers 5.18 leaves the template's marks around all of them."""
    model = make_vision_workspace(tmp_path, "qwen3_vl", num_chats=1) / "model"
    settings = {"size": {"shortest_edge": 64, "longest_edge": 10**6}}
    (model / "video_preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<end>"]})
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<video>", "<start><video><end>")
    names = {"video_token_id": "<video>", "vision_start_token_id": "<start>", "vision_end_token_id": "<end>"}
    config = read_config(model)
    for key, token in names.items():
        setattr(config, key, tokenizer.convert_tokens_to_ids(token))
    found = open_readers(model, config, encode=functools.partial(tokenizer.encode, add_special_tokens=False))
    paths = frames(tmp_path, count)
    parts = [{"type": "text", "text": "What is "}, {"type": "video", "path": Frames(paths, 2.0)}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "It is red."}]
    sequence = ChatTokenizer(tokenizer, "all", found)(Chat(chat), "here")
    tokens = 2 * 3
    last = 1.25 if count == 4 else 1.0
    text = "".join(f"<{seconds:.1f} seconds><start>" + "<video>" * tokens + "<end>" for seconds in (0.25, last))
    assert tokenizer.decode(sequence.input_ids).startswith(f"<|im_start|>user\nWhat is {text}<|im_end|>")
    assert tokenizer.decode(sequence.input_ids[sequence.loss_mask]).startswith("It is red.")
    assert [item.size for item in sequence.media] == [(1, 4, 6)] * 2
    for number, item in enumerate(sequence.media):
        own = sequence.input_ids[item.start : item.start + item.num_tokens]
        assert (own == config.video_token_id).all()
        whole: Any = open_readers(model, config)
        grid = (1, 4, 6)
        assert torch.equal(
            item.load(), whole.by_part_type["video"].load(paths[2 * number : 2 * number + 2], "here", grid)
        )


def test_limits_of_qwen3_are_of_all_frames_together(tmp_path: Path) -> None:
    model = make_vision_workspace(tmp_path, "qwen3_vl", num_chats=1) / "model"
    settings = {"video_processor": {"size": {"shortest_edge": 64, "longest_edge": 1536}}}
    (model / "processor_config.json").write_text(json.dumps(settings))
    reader: Any = open_readers(model, read_config(model))
    paths = frames(tmp_path, 8)  # of 384 pixels
    (_, first), *_ = reader.by_part_type["video"].patches(Frames(paths, 2.0), "here")
    assert first.grid[1] * first.grid[2] * PATCH**2 * 8 <= 1536
    limited: Any = open_readers(model, read_config(model), ReadingOptions((None, 256)))
    (_, first), *_ = limited.by_part_type["video"].patches(Frames(paths, 2.0), "here")
    assert 192 // 2 < first.grid[1] * first.grid[2] * PATCH**2 <= 256
