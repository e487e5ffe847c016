"""Chat templates as models are published with them, from TRL's package, with small tokenizers that know their marks."""

import re
from importlib.metadata import files
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MARKS = re.compile(r"<\|[A-Za-z0-9_]+\|?>|<｜[^｜]+｜>|</?s>|<\w+_of_turn>|<turn\|>|\[/?[A-Z_]{4,}\]")
"""Pattern of special tokens."""

CALLING = (
    *("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "glm4moe", "gptoss"),
    *("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2", "llama3_1", "llama3_2", "muse_glimmer"),
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen2_5", "qwen3"),
    *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl"),
)
"""Templates that write calls of tools."""

SILENT = ("deepseek_r1_distill", "idefics3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm")
"""Templates that leave calls out without a word."""


TEMPLATES = sorted(
    file.name.removesuffix(".jinja") for file in files("trl") or [] if file.match("chat_templates/*.jinja")
)
"""All templates."""

PUBLISHED = [name for name in TEMPLATES if not name.endswith("_training")]
"""Templates as models have them."""

TWINS = [name for name in TEMPLATES if f"{name}_training" in TEMPLATES]
"""Templates that TRL also has with marks around what the assistant writes."""


def template_of(name: str) -> str:
    """A published template."""
    (file,) = (file for file in files("trl") or [] if file.match(f"chat_templates/{name}.jinja"))
    return Path(str(file.locate())).read_text()


def twin_tokenizers(name: str) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """Tokenizers with the same tokens, one with a template as published and one with its marks."""
    texts = template_of(name), template_of(f"{name}_training")
    published, marked = (bytes_tokenizer("".join(texts)) for _ in texts)
    published.chat_template, marked.chat_template = texts
    return published, marked


def stock_tokenizer(name: str, words: str = "hello") -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, and of pieces of some words, with a published template."""
    tokenizer = bytes_tokenizer(template_of(name), words)
    tokenizer.chat_template = template_of(name)
    return tokenizer


def bytes_tokenizer(template: str, words: str = "hello") -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, of pieces of some words, and of the special tokens in a template."""
    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bytewise.train_from_iterator([words], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token="<bos>", eos_token="<eos>")
    marks = sorted(set(MARKS.findall(template)) - {"<bos>", "<eos>"})
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer
