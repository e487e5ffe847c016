"""Small vision-language checkpoints with tokenizer, chat template and image processor, and chats about pictures."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image as Picture
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma4ImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.mistral3.modeling_mistral3 import Mistral3RMSNorm
from transformers.models.pixtral.modeling_pixtral import PixtralRMSNorm

from automodel_rl.batch import pack_microbatch
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.engine import Engine
from automodel_rl.families.known import encoder_families, language_family
from automodel_rl.hf.read import read_config
from automodel_rl.quickstart.model import train_tokenizer
from automodel_rl.tools.verify.command import FLOAT32, FLOAT64, Tolerances, judge
from automodel_rl.tools.verify.comparison import Case, compare, make_sequences
from automodel_rl.tools.verify.media import with_media
from tests.media_chats import write_chats
from tests.rank_pool import RankPool
from tests.tiny import MULTIMODAL_CONFIGS, save_tiny_multimodal_model
from tests.tiny_families import VOCAB

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 230)}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'video' %}<video>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Marks:
    """Special tokens of chats: the token of an image, what the template writes for it, and all others."""

    image: str = "<image>"
    text: str = "<image>"
    video: str = "<video>"
    others: tuple[str, ...] = ("[IMG_BREAK]", "[IMG_END]")


MARKS = {
    "gemma3": Marks("<image_soft_token>", "<start_of_image>", others=("<start_of_image>", "<end_of_image>")),
    "gemma4": Marks("<|image|>", "<|image|>", others=("<|image>", "<image|>", "<|audio|>")),
    "gemma4_unified": Marks("<|image|>", "<|image|>", others=("<|image>", "<image|>", "<|audio|>")),
    "internvl": Marks("<IMG_CONTEXT>", "<IMG_CONTEXT>", others=("<img>", "</img>")),
    "qwen3_5": Marks(
        "<|image_pad|>",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|video_pad|>",
        ("<|vision_start|>", "<|vision_end|>", "<|endoftext|>"),
    ),
}
"""By family, where marks have a meaning for its processor."""

IMAGE_TOKENS = {"gemma3": "image_token_index"}
"""The config's key for the id of an image's tokens, where it has another name."""


@contextmanager
def norms_in_float64() -> Iterator[None]:
    """Gives norms that compute in fp32 whatever the dtype a float64 forward, so that comparisons can be exact."""
    with ExitStack() as stack:
        for kind in (PixtralRMSNorm, Mistral3RMSNorm, MistralRMSNorm):
            stack.enter_context(mock.patch.object(kind, "forward", _plain_norm))
        stack.enter_context(mock.patch.object(Gemma3RMSNorm, "forward", _norm_around_one))
        yield


def _plain_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def _norm_around_one(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return (1 + norm.weight) * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.eps)


def components_of(vision: dict, language: dict) -> ComponentsConfig:
    return ComponentsConfig.model_validate({"vision": vision, "language": language})


def compare_exactly(case: Case, folder: Path) -> list:
    with norms_in_float64():
        return compare(case, folder, folder)


def tolerances_of(folder: Path) -> Tolerances:
    """Those of `compare_exactly`, which makes norms exact, but not every encoder, and not modules that stay in fp32."""
    config = read_config(folder)
    encoders = encoder_families(config).values()
    language = language_family(config)
    in_fp32 = any(encoder.computes_in_fp32 for encoder in encoders) or bool(language.fp32_modules)
    in_fp32 = in_fp32 or (language.is_moe and language.computes_in_fp32)  # the router
    return FLOAT32 if in_fp32 else FLOAT64


def assert_equal(ranks: RankPool, folder: Path, case: Case) -> None:
    """Raises AssertionError if a layout and plain transformers differ."""
    num_ranks = case.parallel.world_size if case.components is None else case.components.world_size
    found = ranks(num_ranks).run(compare_exactly, case, folder)[0]
    different = [microbatch for microbatch in judge(found, tolerances_of(folder)) if not microbatch.is_equal]
    assert not different, different


def microbatches_of(engine: Engine, images_of: tuple[int, ...], step: int = 0) -> list:
    """A microbatch with so many images for every data rank of the language model, none for an outsider."""
    layout = engine.handle.layout
    if layout.is_outsider:
        return []
    (sequence,) = make_sequences(1, 10 * step + layout.data_rank, engine.handle.config.vocab_size)
    return [pack_microbatch([with_media(sequence, engine.handle.whole_config, images_of[layout.data_rank])])]


def make_vision_workspace(folder: Path, family: str, num_chats: int = 24, text: dict | None = None) -> Path:
    """A checkpoint in `model/`, and `train.jsonl` and `held_out.jsonl` with pictures of one colour and many sizes
    beside them, for sft, as pairs and as prompts; every third chat has none and every fourth two.

    Args:
        folder: where all go.
        family: the family of the checkpoint.
        num_chats: how many chats there are to train on.
        text: other sizes of the language model.
    """
    rng = np.random.default_rng(0)
    chats = [_chat(folder, number, rng) for number in range(num_chats + 4)]
    write_chats(folder, chats, ("images",))
    texts = ["What is this? And this? It is red. green. blue. There is nothing to see."] * 20
    tokenizer = train_tokenizer(texts, VOCAB * 2)
    marks = MARKS.get(family, Marks())
    tokenizer.add_special_tokens({"additional_special_tokens": [marks.image, *marks.others, marks.video]})
    tokenizer.chat_template = TEMPLATE.replace("<image>", f"{{{{ '{marks.text}' }}}}").replace("<video>", marks.video)
    ids = {IMAGE_TOKENS.get(family, "image_token_id"): tokenizer.convert_tokens_to_ids(marks.image)}
    if family.startswith("gemma4"):
        ids["audio_token_id"] = tokenizer.convert_tokens_to_ids("<|audio|>")
    if family.startswith(("qwen", "gemma4")):
        ids["video_token_id"] = tokenizer.convert_tokens_to_ids(marks.video)
    for edge in ("start", "end") if family == "qwen3_5" else ():
        ids[f"vision_{edge}_token_id"] = tokenizer.convert_tokens_to_ids(f"<|vision_{edge}|>")
    save_tiny_multimodal_model(
        folder / "model", family, num_layers=2, dtype=torch.float32,
        text={"vocab_size": len(tokenizer), **(text or {})}, ids=ids,
    )  # fmt: skip
    tokenizer.save_pretrained(folder / "model")
    _save_image_processor(folder / "model", family, marks)
    return folder


def _save_image_processor(folder: Path, family: str, marks: Marks) -> None:
    vision = MULTIMODAL_CONFIGS[family][2]["vision"]
    if family == "llava":
        size = vision["image_size"]
        CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(
            folder
        )
    elif family == "gemma3":
        size = vision["image_size"]
        Gemma3ImageProcessorPil(size={"height": size, "width": size}).save_pretrained(folder)
    elif family.startswith("gemma4"):
        Gemma4ImageProcessorPil(
            patch_size=vision["patch_size"], pooling_kernel_size=vision["pooling_kernel_size"], max_soft_tokens=70
        ).save_pretrained(folder)
    elif family == "mistral3":
        PixtralImageProcessorPil(patch_size={"height": 4, "width": 4}, size={"longest_edge": 24}).save_pretrained(
            folder
        )
    elif family == "internvl":
        height, width = vision["image_size"]
        pictures = GotOcr2ImageProcessorPil(size={"height": height, "width": width})
        pictures.save_pretrained(folder)
        whole = {"processor_class": "InternVLProcessor", "image_seq_length": 4, "image_processor": pictures.to_dict()}
        (folder / "processor_config.json").write_text(json.dumps(whole))
        settings = folder / "tokenizer_config.json"
        named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        named["video_token"] = marks.video
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"extra_special_tokens": named}))
    elif family.startswith("glm4v"):
        Glm4vImageProcessorPil(
            patch_size=vision["patch_size"], size={"shortest_edge": 128, "longest_edge": 1280}
        ).save_pretrained(folder)
    else:
        Qwen2VLImageProcessorPil(
            patch_size=vision["patch_size"], size={"shortest_edge": 64, "longest_edge": 640}
        ).save_pretrained(folder)


def _chat(folder: Path, number: int, rng: np.random.Generator) -> dict:
    if number % 3 == 2:
        question, answer = "What is this?", "There is nothing to see."
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    names = [str(rng.choice(list(COLOURS))) for _ in range(2 if number % 4 == 3 else 1)]
    files = []
    for place, name in enumerate(names):
        width, height = rng.integers(10, 40, 2).tolist()
        files.append(f"{number}_{place}.png")
        Picture.new("RGB", (width, height), COLOURS[name]).save(folder / files[-1])
    parts = [part for _ in names for part in ({"type": "image"}, {"type": "text", "text": "What is this?"})]
    answer = "It is " + " ".join(f"{name}." for name in names)
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}], "images": files}
