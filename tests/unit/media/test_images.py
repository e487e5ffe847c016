"""Pictures of chats: tokens by size alone, pixels by the model's own processor, and damage told in one line."""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image as Picture
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BaseVideoProcessor,
    Gemma3Processor,
    Gemma4ImageProcessorPil,
    InternVLProcessor,
)

from automodel_rl.batch import Image, TokenSequence
from automodel_rl.config import SourceConfig
from automodel_rl.config.data import SourcesConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.checks import check_records
from automodel_rl.data.media import MediaReaders, cut, open_readers
from automodel_rl.data.messages import Chat
from automodel_rl.data.records import read_chat
from automodel_rl.errors import InputError
from automodel_rl.families.encoder import DEFAULTS, ReadingOptions
from automodel_rl.hf.read import read_config
from automodel_rl.media.images import ImageReader, check_picture, open_picture, picture_size
from tests.vision import make_vision_workspace


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImageReader]:
    found = {}
    for family in ("llava", "qwen2_5_vl", "mistral3", "glm4v", "gemma4", "gemma4_unified"):
        folder = make_vision_workspace(tmp_path_factory.mktemp(family), family, num_chats=1)
        found[family] = images_of(folder / "model")
    return found


def media_of(folder: Path, options: ReadingOptions = DEFAULTS) -> MediaReaders:
    found = open_readers(folder, read_config(folder), options)
    assert found is not None
    return found


def images_of(folder: Path, options: ReadingOptions = DEFAULTS) -> ImageReader:
    reader = media_of(folder, options).by_part_type["image"]
    assert isinstance(reader, ImageReader)
    return reader


def jpeg(width: int, height: int, turned: bool = False) -> bytes:
    file = io.BytesIO()
    exif = Picture.Exif()
    exif[0x0112] = 6 if turned else 1
    Picture.effect_noise((width, height), 90).convert("RGB").save(file, "JPEG", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "mistral3", "glm4v", "gemma4", "gemma4_unified"])
@pytest.mark.parametrize("size", [(40, 20), (13, 31), (9, 9)])
@pytest.mark.parametrize("turned", [False, True])
def test_sizes_tell_how_many_tokens_the_pixels_make(
    readers: dict[str, ImageReader], family: str, size: tuple[int, int], turned: bool
) -> None:
    image = readers[family](jpeg(*size, turned), "here")
    pixels = image.load()
    if family == "llava":
        assert (pixels.shape, image.num_tokens) == ((3, 12, 12), 9)
    elif family == "mistral3":
        rows, columns = (side // 8 for side in pixels.shape[1:])
        assert (image.num_tokens, image.row, image.num_embeddings) == (rows * (columns + 1), columns, rows * columns)
    else:
        of_token = 1 if family == "gemma4_unified" else 4
        assert len(pixels) == image.grid[1] * image.grid[2] == of_token * image.num_tokens


def test_limits_of_pixels_decide_how_many_tokens_an_image_has(tmp_path: Path) -> None:
    folder = make_vision_workspace(tmp_path, "qwen2_5_vl", num_chats=1) / "model"
    for limits, tokens in (((None, None), 9), ((None, 256), 4), ((576, None), 9), ((1024, 2048), 16)):
        image = images_of(folder, ReadingOptions(limits))(jpeg(24, 24), "here")
        assert (image.num_tokens, len(image.load())) == (tokens, 4 * tokens)
    with pytest.raises(InputError, match="images of 641 to 640 pixels, where the image processor has 64 to 640"):
        images_of(folder, ReadingOptions((641, None)))


def test_limits_of_glm_are_pixels_of_an_image_too(tmp_path: Path) -> None:
    """Its image processor counts a picture twice, as a video of two frames."""
    folder = make_vision_workspace(tmp_path, "glm4v", num_chats=1) / "model"
    for limits, tokens in (((None, None), 9), ((None, 256), 4), ((1024, 2048), 16)):
        assert images_of(folder, ReadingOptions(limits))(jpeg(24, 24), "here").num_tokens == tokens


def test_an_image_travels_light(readers: dict[str, ImageReader]) -> None:
    for reader in readers.values():
        picture = jpeg(400, 300)
        assert len(pickle.dumps(reader(picture, "here"))) < len(picture) + 4000


def test_damaged_pictures_are_named(readers: dict[str, ImageReader], tmp_path: Path) -> None:
    (tmp_path / "half.jpg").write_bytes(jpeg(400, 300)[:4000])
    (tmp_path / "none.jpg").write_bytes(b"no picture")
    reader = readers["qwen2_5_vl"]
    with pytest.raises(InputError, match=r"chats.jsonl:3: cannot read the image .*none.jpg"):
        reader(str(tmp_path / "none.jpg"), "chats.jsonl:3")
    image = reader(str(tmp_path / "half.jpg"), "chats.jsonl:4")
    with pytest.raises(InputError, match=r"chats.jsonl:4: cannot read the image .*half.jpg"):
        image.load()


def test_rows_of_an_image_end_with_breaks(tmp_path: Path) -> None:
    """As Mistral's processor writes them, which needs torchvision: its pattern, with sizes by its image processor."""
    folder = make_vision_workspace(tmp_path, "mistral3", num_chats=1) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    breaks = (tokenizer.convert_tokens_to_ids("[IMG_BREAK]"), tokenizer.convert_tokens_to_ids("[IMG_END]"))
    pictures = [jpeg(40, 20), jpeg(9, 17)]
    opened = [Picture.open(io.BytesIO(picture)) for picture in pictures]
    made = AutoImageProcessor.from_pretrained(folder, backend="pil")(opened, patch_size={"height": 8, "width": 8})
    written = []
    for height, width in made["image_sizes"]:
        rows = ["<image>" * (width // 8) + "[IMG_BREAK]"] * (height // 8)
        written.append("".join(rows).removesuffix("[IMG_BREAK]") + "[IMG_END]")
    text = "What is{} this? And this{}"
    plain = torch.tensor(tokenizer(text.format("<image>", "<image>")).input_ids)
    media = media_of(folder, ReadingOptions(breaks=breaks))
    parts = [{"type": "image", "path": picture} for picture in pictures]
    inserts = media.read([{"role": "user", "content": parts}], "here")
    images = [insert.media[0] for insert in inserts]
    trained = torch.ones(len(plain), dtype=torch.bool)
    sequence = media.expand(TokenSequence(plain, trained), inserts, "here")
    assert sequence.input_ids.tolist() == tokenizer(text.format(*written)).input_ids
    assert [image.load().shape[1:] for image in images] == [tuple(size) for size in made["image_sizes"]]


def test_images_of_gemma_are_written_as_by_its_processor(tmp_path: Path) -> None:
    """Also where the line breaks around an image meet others."""
    folder = make_vision_workspace(tmp_path, "gemma3", num_chats=1) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, token in (("boi", "<start_of_image>"), ("image", "<image_soft_token>"), ("eoi", "<end_of_image>")):
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor = Gemma3Processor(image_processor, tokenizer, tokenizer.chat_template, image_seq_length=9)
    picture = jpeg(40, 20)
    parts = [{"type": "image"}, {"type": "text", "text": "\nWhat is this?\n"}, {"type": "image"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "It is red."}]
    text = processor.apply_chat_template(chat)
    opened = [Picture.open(io.BytesIO(picture))] * 2
    expected = processor(images=opened, text=text, return_tensors="pt")
    named = [{**part, "path": picture} if part["type"] == "image" else part for part in parts]
    sequence = ChatTokenizer(tokenizer, "all", media_of(folder))(
        Chat([{"role": "user", "content": named}, chat[1]]), "here"
    )
    assert sequence.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert torch.equal(sequence.media[1].load(), expected["pixel_values"][1])
    assert tokenizer.decode(sequence.input_ids[sequence.loss_mask]).startswith("It is red.")
    assert all(image.bidirectional == "everywhere" and image.num_tokens == 9 for image in sequence.media)


@pytest.mark.parametrize("size", [(40, 20), (13, 131), (16, 16), (90, 80)])
def test_tiles_of_internvl_are_those_of_its_processor(tmp_path: Path, size: tuple[int, int]) -> None:
    """One or several, each with its tokens, between the tokens of an image."""
    folder = make_vision_workspace(tmp_path, "internvl", num_chats=1) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor = InternVLProcessor(image_processor, tokenizer, mock.Mock(BaseVideoProcessor), 4, tokenizer.chat_template)
    picture = jpeg(*size)
    parts = [{"type": "image", "path": picture}, {"type": "text", "text": "What is this?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "It is red."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    expected = processor(images=[Picture.open(io.BytesIO(picture))], text=text)
    sequence = ChatTokenizer(tokenizer, "all", media_of(folder))(Chat(chat), "here")
    assert sequence.input_ids.tolist() == expected["input_ids"][0]
    pixels = sequence.media[0].load()
    assert torch.equal(pixels, torch.stack([torch.as_tensor(tile) for tile in expected["pixel_values"]]))
    assert sequence.media[0].num_tokens == 4 * len(pixels)


@pytest.mark.parametrize("size", [(40, 20), (13, 131), (16, 16), (90, 80)])
def test_images_of_gemma_4_are_written_as_by_its_processor(tmp_path: Path, size: tuple[int, int]) -> None:
    """Which needs torchvision: its pattern, with numbers of tokens by its image processor."""
    folder = make_vision_workspace(tmp_path, "gemma4", num_chats=1) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    picture = jpeg(*size)
    parts = [{"type": "image", "path": picture}, {"type": "text", "text": "What is this?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "It is red."}]
    made = Gemma4ImageProcessorPil.from_pretrained(folder)([Picture.open(io.BytesIO(picture))], return_tensors="pt")
    (num_tokens,) = made["num_soft_tokens_per_image"]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    written = text.replace("<|image|>", f"<|image>{'<|image|>' * num_tokens}<image|>")
    sequence = ChatTokenizer(tokenizer, "all", media_of(folder))(Chat(chat), "here")
    assert sequence.input_ids.tolist() == tokenizer(written).input_ids
    (image,) = sequence.media
    pixels = image.load()
    assert torch.equal(pixels, made["pixel_values"][0][: len(pixels)])
    assert len(pixels) == (made["image_position_ids"] >= 0).all(-1).sum() == 4 * image.num_tokens


def test_patches_of_a_token_are_one_for_the_unified_gemma_4(tmp_path: Path) -> None:
    folder = make_vision_workspace(tmp_path, "gemma4_unified", num_chats=1) / "model"
    image = images_of(folder)(jpeg(*(8 * side for side in (10, 7))), "here")  # no other size is nearer to 70 tokens
    assert image.size == (1, 7, 10)
    patches = image.load()
    plain = Gemma4ImageProcessorPil.from_pretrained(folder)(
        images=[Picture.open(io.BytesIO(image.source))], return_tensors="pt"
    )
    found = torch.zeros(7, 10, 8, 8, 3)
    for values, (x, y) in zip(plain["pixel_values"][0], plain["image_position_ids"][0].tolist(), strict=True):
        found[y // 2, x // 2, y % 2 * 4 : y % 2 * 4 + 4, x % 2 * 4 : x % 2 * 4 + 4] = values.view(4, 4, 3)
    assert torch.equal(patches, found.view(70, -1))


def test_a_template_that_writes_no_images_is_for_texts_only(tmp_path: Path) -> None:
    folder = make_vision_workspace(tmp_path, "gemma3", num_chats=1) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for content in ("{{ m.content }}", "{{ raise_exception('texts only') if m.content is not string else m.content }}"):
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
            "{% endgeneration %}{% else %}" + content + "<|im_end|>{% endif %}{% endfor %}"
        )
        write = ChatTokenizer(tokenizer, "all", media_of(folder))
        answer = {"role": "assistant", "content": "It is red."}
        assert len(write(Chat([{"role": "user", "content": "What is this?"}, answer]), "here"))
        seen = [{"role": "user", "content": [{"type": "image", "path": jpeg(9, 9)}]}, answer]
        with pytest.raises(InputError, match="writes 0 image tokens for 1 parts|refuses these messages"):
            write(Chat(seen), "here")


def test_images_cut_in_several_are_refused(tmp_path: Path) -> None:
    folder = make_vision_workspace(tmp_path, "gemma3", num_chats=1) / "model"
    settings = folder / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_pan_and_scan": True}))
    with pytest.raises(InputError, match="set do_pan_and_scan to false"):
        images_of(folder)


def test_a_cut_keeps_no_part_of_an_image() -> None:
    images = (Image(1, 3, (1, 1, 3), torch.zeros(0)), Image(6, 3, (1, 1, 3), torch.zeros(0)))
    whole = TokenSequence(torch.arange(10), torch.ones(10, dtype=torch.bool), media=images)
    assert [(len(cut(whole, limit)), len(cut(whole, limit).media)) for limit in (2, 4, 7, 9)] == [
        (1, 0),
        (4, 1),
        (6, 1),
        (9, 2),
    ]


PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content if p.type == 'image' %}<image>{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_texts_are_not_lost_by_a_template_that_reads_parts_only(tmp_path: Path) -> None:
    folder = make_vision_workspace(tmp_path, "llava", num_chats=1) / "model"
    reader, tokenizer = images_of(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = PARTS_ONLY
    parts = [{"type": "image", "path": jpeg(9, 9)}, {"type": "text", "text": "What is this?"}]
    chat = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "red."},
        {"role": "user", "content": "And this?"},
        {"role": "assistant", "content": "blue."},
    ]
    sequence = ChatTokenizer(tokenizer, "all", MediaReaders({"image": reader}))(Chat(chat), "here")
    text = tokenizer.decode(sequence.input_ids[sequence.input_ids != reader.token_id])
    assert text == "user: What is this?;assistant: red.;user: And this?;assistant: blue.;"
    assert tokenizer.decode(sequence.input_ids[sequence.loss_mask]) == "red.;blue.;"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": "x"}, "a part of content has type 'image_url'"),
        ({"type": "video", "path": "x"}, "a part of type video has .x. for frames"),
        ("hi", "a part of content has type None"),
        ({"type": "image", "path": 5}, "a part of type image has 5 for file"),
    ],
)
def test_parts_that_nobody_reads_are_refused(part: object, message: str) -> None:
    record = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "yes"}]}
    with pytest.raises(InputError, match=message):
        read_chat(record, SourceConfig(path="chats.jsonl"), "chats.jsonl:1")


def test_bytes_of_a_dataset_are_pictures() -> None:
    record = {
        "messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "yes"}],
        "images": [{"bytes": b"...", "path": None}],
    }
    (user, _) = read_chat(record, SourceConfig(path="chats.jsonl"), "chats.jsonl:1").messages
    assert user["content"] == [{"type": "image", "path": b"..."}]


def encoded(form: str, **more: object) -> bytes:
    file = io.BytesIO()
    Picture.effect_noise((64, 64), 90).convert("RGB").save(file, form, **more)
    return file.getvalue()


def bomb() -> bytes:
    file = io.BytesIO()
    Picture.new("1", (20_000, 10_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP"])
def test_a_picture_that_is_cut_off_is_found_where_records_are_checked(form: str, tmp_path: Path) -> None:
    whole, path = encoded(form), tmp_path / "p"
    check_picture(whole, "d:1")
    check_picture(whole + b"\0" * 9, "d:1")
    check_picture(whole + b"further data", "d:1")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="d:1: cannot read the image .*use an intact image"):
        check_picture(str(path), "d:1")


@pytest.mark.parametrize("read", [check_picture, picture_size, open_picture])
def test_a_picture_of_too_many_pixels_is_one_line(read: Callable[[bytes, str], object]) -> None:
    with pytest.raises(InputError, match=r"d:1: cannot read .*exceeds limit.*: make it smaller"):
        read(bomb(), "d:1")


@pytest.mark.parametrize("content", [jpeg(64, 64)[:900], bomb(), b"x"], ids=["cut", "large", "none"])
def test_damaged_pictures_are_told_before_the_first_step(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(content)
    parts = [{"type": "image", "path": "p"}, {"type": "text", "text": "?"}]
    record = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "d.jsonl").write_text(json.dumps(record))
    config = SourcesConfig(train=(SourceConfig(path=str(tmp_path / "d.jsonl")),))
    with pytest.raises(InputError, match="d.jsonl:1: cannot read the image"):
        check_records(config, read_chat)
