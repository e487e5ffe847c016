"""Small chat checkpoints with random weights (Qwen3, or Qwen2.5-VL for images) and a tokenizer trained on the fly."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
)

BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
IMAGE_MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Special tokens around images, by config key."""

PATCH = 8
"""Patch side in pixels. An image token covers two by two patches."""

CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\ntools:' }}{% for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Renders a tool call like the chat template."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def train_tokenizer(texts: list[str], vocab_size: int, digits: int = 1) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer, with a ChatML template that marks assistant turns.

    Args:
        vocab_size: maximum number of tokens.
        digits: maximum digits per token. Longer numbers are split from the left.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"\d{{1,{digits}}}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE, padding_side="left"
    )


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, hidden_size: int = 128) -> None:
    """Writes a Hugging Face checkpoint with random parameters, about one million at the default hidden size."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_vision_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Writes a vision-language checkpoint of about one million random parameters, with its image processor."""
    tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_MARKS.values()]})
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "initializer_range": 0.05,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "window_size": 8 * PATCH,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.05,
        },
        tie_word_embeddings=True,
        **{name: tokenizer.convert_tokens_to_ids(mark) for name, mark in IMAGE_MARKS.items()},
    )
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"shortest_edge": 4 * (2 * PATCH) ** 2, "longest_edge": 64 * (2 * PATCH) ** 2}
    Qwen2VLImageProcessorPil(patch_size=PATCH, size=sizes).save_pretrained(folder)
