"""Prompts with pictures, and a checkpoint of Qwen2.5-VL-3B's shape that reads them, for `grpo.py --workload vision`."""

import json
from pathlib import Path

import numpy as np
from PIL import Image as Picture
from transformers import Qwen2VLImageProcessorPil
from vision import write_model

from automodel_rl.quickstart.model import train_tokenizer

MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE = 28
"""Pixels of an image token, in height and in width."""


def write_vision_checkpoint(folder: Path, texts: list[str], *, tiny: bool) -> None:
    """A checkpoint with random weights, a tokenizer trained on the texts, and an image processor of 64 to 1,024 tokens
    an image, or of 4 to 16 if tiny."""
    tokenizer = train_tokenizer(texts, 400 if tiny else 4000)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(MARKS)
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    write_model(folder, tiny, ids)
    tokenizer.save_pretrained(folder)
    least, most = (4, 16) if tiny else (64, 1024)
    sizes = {"shortest_edge": least * SIDE**2, "longest_edge": most * SIDE**2}
    Qwen2VLImageProcessorPil(size=sizes).save_pretrained(folder)


def write_picture_prompts(source: Path, folder: Path, count: int, *, tiny: bool) -> Path:
    """The first prompts of a file, each after a picture of its own: coloured squares, 8 to 32 image tokens a side."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    lines = []
    with source.open() as records:
        for number, line in zip(range(count), records, strict=False):
            record = json.loads(line)
            height, width = generator.integers(2, 5, 2) if tiny else generator.integers(8, 33, 2)
            squares = generator.integers(0, 256, (int(height), int(width), 3), dtype=np.uint8)
            picture = Picture.fromarray(squares).resize(
                (int(width) * SIDE, int(height) * SIDE), Picture.Resampling.NEAREST
            )
            picture.save(folder / f"{number}.png")
            question = record["prompt"][-1]["content"]
            parts = [{"type": "image"}, {"type": "text", "text": question}]
            record |= {"prompt": [{"role": "user", "content": parts}], "images": [f"{number}.png"]}
            lines.append(json.dumps(record) + "\n")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(lines))
    return prompts
