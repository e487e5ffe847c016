"""A vision-language model of Qwen2.5-VL-3B's shape, with its components on one mesh or on two: losses, and tokens/s.

    python benchmarks/vision.py -                                                     one device
    torchrun --nproc-per-node 2 benchmarks/vision.py "0 | 1" dp_shard=2               encoder on 0, language model on 1
    torchrun --nproc-per-node 4 benchmarks/vision.py "0 | 1-3 pp=3" dp_shard=4 pp=4
    python benchmarks/vision.py - --tiny --steps 2                                    check the script on a CPU

A layout is `-`, a `parallel` section for both components, or `ENCODER | LANGUAGE`, each with its ranks first. All of
them train from the same random weights (seed 0) on the same batches: texts of skewed random tokens, of which three
in four have one or two images of 64 to 1,024 tokens; their pixels are noise. bf16 compute, fp32 master weights, 32,768
tokens a step in microbatches of 8,192, whatever the number of devices. Prints a JSON line for each layout: the loss of
every step, and medians of the steps after 3, with the device synchronised at step edges only.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForImageTextToText
from workload import parse_layout

from automodel_rl import Engine, ModelHandle, OptimizerConfig, TokenSequence, pack, sft_loss
from automodel_rl.batch import Image, Microbatch
from automodel_rl.config import ModelConfig
from automodel_rl.config.components import ComponentsConfig, one_layout
from automodel_rl.config.model import MemoryConfig
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries

SIZES: dict[str, Any] = {
    "text_config": {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
TINY: dict[str, Any] = {
    "text_config": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    },
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
}  # fmt: skip
MERGE, PATCH_VALUES = 2, 3 * 2 * 14 * 14
IMAGE_TOKEN = 32767


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="+")
    parser.add_argument("--tokens", type=int, default=32768, help="a step, over all devices")
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.tokens, options.microbatch_tokens = 2048, 1024
    quiet_libraries()
    layouts = [parse_components(layout) for layout in options.layouts]
    join_process_group(layouts[0][0].world_size)
    folder = Path(tempfile.gettempdir(), "automodel_rl_benchmarks", "vision_tiny" if options.tiny else "vision")
    if dist.get_rank() == 0 and not (folder / "config.json").is_file():
        write_model(folder, options.tiny, {"image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_TOKEN - 1})
    dist.barrier()
    for name, (components, memory) in zip(options.layouts, layouts, strict=True):
        result = measure(components, memory, folder, options)
        if dist.get_rank() == 0:
            print(json.dumps({"layout": name, **result}), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    dist.barrier()
    os._exit(0)  # a finished measurement must not wait for libraries to tear down


def parse_components(text: str) -> tuple[ComponentsConfig, MemoryConfig]:
    if "|" not in text:
        parallel, memory = parse_layout(text)
        return one_layout(parallel, ["vision"]), memory
    vision, language = ({"ranks": part.split()[0], **_pairs(part.split()[1:])} for part in text.split("|"))
    memory = MemoryConfig(**{key: language.pop(key) for key in list(language) if key in MemoryConfig.model_fields})
    return ComponentsConfig.model_validate({"vision": vision, "language": language}), memory


def _pairs(words: list[str]) -> dict[str, Any]:
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def write_model(folder: Path, tiny: bool, ids: dict[str, int]) -> None:
    """A checkpoint with random weights (seed 0), untied, in bf16; `ids` are those of its special tokens."""
    sizes = {name: {**SIZES[name], **(TINY[name] if tiny else {})} for name in SIZES}
    config = AutoConfig.for_model("qwen2_5_vl", **sizes, **ids, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)


class Noise:
    """Pixels of an image: a stretch of noise that every rank makes for itself, once."""

    table: torch.Tensor | None = None

    def __init__(self, start: int, num_patches: int):
        self.start, self.num_patches = start, num_patches

    def __call__(self) -> torch.Tensor:
        if Noise.table is None:
            Noise.table = torch.randn(16384, PATCH_VALUES, generator=torch.Generator().manual_seed(0))
        return Noise.table[self.start : self.start + self.num_patches]


def make_batch(num_tokens: int, longest: int, seed: int) -> list[TokenSequence]:
    """Sequences of text, three in four with one or two images; only text is trained."""
    generator = np.random.default_rng(seed)
    sequences: list[TokenSequence] = []
    while num_tokens > 0:
        images: list[Image] = []
        pieces: list[Any] = []
        masks: list[Any] = []
        for _ in range(int(generator.choice([0, 1, 1, 2]))):
            height, width = (int(side) for side in generator.integers(8, min(32, int(longest**0.5)) + 1, 2))
            length = int(generator.integers(8, 65))
            grid, start = (1, height * MERGE, width * MERGE), sum(map(len, pieces)) + length
            pixels = Noise(int(generator.integers(8192)), height * width * MERGE**2)
            images.append(Image(start, height * width, grid, pixels))
            pieces += [_text(length, generator), np.full(height * width, IMAGE_TOKEN)]
            masks += [np.ones(length, bool), np.zeros(height * width, bool)]
        length = int(generator.integers(32, 513))
        pieces.append(_text(length, generator))
        masks.append(np.ones(length, bool))
        ids, mask = torch.from_numpy(np.concatenate(pieces)), torch.from_numpy(np.concatenate(masks))
        if len(ids) <= longest:
            sequences.append(TokenSequence(ids, mask, media=tuple(images)))
            num_tokens -= len(ids)
    return sequences


def _text(length: int, generator: np.random.Generator) -> np.ndarray:
    return (32000 * generator.random(length) ** 4).astype(np.int64)


def measure(
    components: ComponentsConfig, memory: MemoryConfig, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    model = ModelConfig(path=str(folder), dtype="bfloat16")
    handle = ModelHandle.from_pretrained(model, memory=memory, components=components)
    engine = Engine(handle, OptimizerConfig(lr=1e-5, warmup_steps=5, decay="constant"))
    layout, device = handle.layout, handle.layout.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, seconds, tokens, images = [], [], [], []
    for step in range(options.steps):
        sequences = make_batch(options.tokens, options.microbatch_tokens, seed=step)
        microbatches: list[Microbatch] = []
        if not layout.is_outsider:
            microbatches = pack(
                sequences,
                options.microbatch_tokens,
                share=layout.data_share,
                min_microbatches=layout.parallel.pp,
                cost=handle.flops,
            )
        started = _now(device)
        losses.append(round(engine.train_step(microbatches, sft_loss).loss, 5))
        seconds.append(_now(device) - started)
        tokens.append(sum(map(len, sequences)))
        images.append(sum(len(sequence.media) for sequence in sequences))
    rates = [count / second for count, second in zip(tokens, seconds, strict=True)][3:] or [0.0]
    reserved = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, round(reserved, 1))
    return {
        "tokens_per_second": round(statistics.median(rates), 1),
        "step_s": round(statistics.median(seconds[3:] or seconds), 4),
        "images_per_step": statistics.median(images),
        "reserved_gib": peaks,
        "losses": losses,
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


if __name__ == "__main__":
    main()
