"""Small checkpoints that hear, with tokenizer, chat template and feature extractor, and chats about tones."""

import json
from pathlib import Path

import numpy as np
import soundfile
import torch
from PIL import Image as Picture
from transformers import Qwen2VLImageProcessorPil, WhisperFeatureExtractor

from automodel_rl.quickstart.model import train_tokenizer
from tests.media_chats import write_chats
from tests.tiny import save_tiny_multimodal_model
from tests.tiny_families import VOCAB

PITCHES = {"low": 200, "middle": 800, "high": 3200}
RATES = (16000, 22050, 8000)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part.type == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>"]
IDS = {
    "qwen2_audio": {"audio_token_index": "<|AUDIO|>"},
    "qwen2_5_omni_thinker": {
        "audio_token_index": "<|AUDIO|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
        "image_token_index": "<|IMAGE|>",
        "video_token_index": "<|VIDEO|>",
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
    },
}
"""Keys of configs, and the tokens whose ids they have."""


def tone(path: Path, pitch: int, seconds: float, rate: int, channels: int = 1) -> None:
    """Writes a file with a tone."""
    wave = np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate) / 2
    soundfile.write(path, np.stack([wave] * channels, axis=1), rate)


def make_hearing_workspace(folder: Path, family: str = "qwen2_audio", num_chats: int = 24) -> Path:
    """A checkpoint in `model/`, and `train.jsonl` and `held_out.jsonl` with tones of many lengths and sampling rates
    beside them, for sft, as pairs and as prompts; every third chat has none and every fourth two. A model that sees has
    a picture before the last tone, or a video of three frames."""
    rng = np.random.default_rng(0)
    sees = family == "qwen2_5_omni_thinker"
    chats = [_chat(folder, number, rng, sees) for number in range(num_chats + 4)]
    write_chats(folder, chats, ("audio", "images", "videos"))
    texts = ["What is this? And this? It is low. middle. high. There is nothing to hear."] * 20
    tokenizer = train_tokenizer(texts, VOCAB * 2)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    save_tiny_multimodal_model(
        folder / "model", family, num_layers=2, dtype=torch.float32,
        text={"vocab_size": len(tokenizer)}, encoders={"audio": {"max_source_positions": 50}},
        ids={key: tokenizer.convert_tokens_to_ids(token) for key, token in IDS[family].items()},
    )  # fmt: skip
    tokenizer.save_pretrained(folder / "model")
    settings = WhisperFeatureExtractor(feature_size=8, chunk_length=1).to_dict()
    if sees:
        settings |= Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 640}).to_dict()
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def _chat(folder: Path, number: int, rng: np.random.Generator, sees: bool) -> dict:
    if number % 3 == 2:
        question, answer = "What is this?", "There is nothing to hear."
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    names = [str(rng.choice(list(PITCHES))) for _ in range(2 if number % 4 == 3 else 1)]
    files = []
    for place, name in enumerate(names):
        files.append(f"{number}_{place}.wav")
        tone(folder / files[-1], PITCHES[name], float(rng.uniform(0.2, 0.9)), RATES[number % 3], 1 + place)
    parts = [part for _ in names for part in ({"type": "audio"}, {"type": "text", "text": "What is this?"})]
    answer = "It is " + " ".join(f"{name}." for name in names)
    chat = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}], "audio": files}
    if sees:
        size = tuple(rng.integers(10, 20, 2).tolist())
        frames = [f"{number}_{place}.png" for place in range(3)]
        for place, frame in enumerate(frames):
            Picture.new("RGB", size, (30, 60 * place, 40)).save(folder / frame)
        parts.insert(-2, {"type": "video", "fps": 1.5} if number % 2 else {"type": "image"})
        chat |= {"videos": [frames]} if number % 2 else {"images": frames[:1]}
    return chat
