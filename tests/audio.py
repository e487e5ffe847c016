"""A small checkpoint that hears, with tokenizer, chat template and feature extractor, and chats about tones."""

import json
from pathlib import Path

import numpy as np
import soundfile
import torch
from transformers import WhisperFeatureExtractor

from automodel_rl.quickstart.model import train_tokenizer
from tests.tiny import save_tiny_multimodal_model
from tests.tiny_families import VOCAB

PITCHES = {"low": 200, "middle": 800, "high": 3200}
RATES = (16000, 22050, 8000)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]


def tone(path: Path, pitch: int, seconds: float, rate: int, channels: int = 1) -> None:
    """Writes a file with a tone."""
    wave = np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate) / 2
    soundfile.write(path, np.stack([wave] * channels, axis=1), rate)


def make_hearing_workspace(folder: Path, num_chats: int = 24) -> Path:
    """A checkpoint in `model/`, and `train.jsonl` and `held_out.jsonl` with tones of many lengths and sampling rates
    beside them, for sft, as pairs and as prompts; every third chat has none and every fourth two."""
    rng = np.random.default_rng(0)
    chats = [_chat(folder, number, rng) for number in range(num_chats + 4)]
    for name, part in (("train", chats[4:]), ("held_out", chats[:4])):
        for ending, form in (("", dict), ("_pairs", _pair), ("_prompts", _prompt)):
            (folder / f"{name}{ending}.jsonl").write_text("".join(json.dumps(form(chat)) + "\n" for chat in part))
    texts = ["What is this? And this? It is low. middle. high. There is nothing to hear."] * 20
    tokenizer = train_tokenizer(texts, VOCAB * 2)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    save_tiny_multimodal_model(
        folder / "model", "qwen2_audio", num_layers=2, dtype=torch.float32,
        text={"vocab_size": len(tokenizer)}, encoders={"audio": {"max_source_positions": 50}},
        ids={"audio_token_index": tokenizer.convert_tokens_to_ids(MARKS[0])},
    )  # fmt: skip
    tokenizer.save_pretrained(folder / "model")
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder / "model")
    return folder


def _prompt(chat: dict) -> dict:
    question, answer = chat["messages"]
    return {"prompt": [question], "answer": answer["content"], "audio": chat.get("audio", [])}


def _pair(chat: dict) -> dict:
    return _prompt(chat) | {"chosen": chat["messages"][1]["content"], "rejected": "What is this? And this?"}


def _chat(folder: Path, number: int, rng: np.random.Generator) -> dict:
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
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}], "audio": files}
