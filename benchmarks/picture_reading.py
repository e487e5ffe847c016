"""Pictures a second that threads and processes read for the encoder: decoded, resized and cut into patches.

    python benchmarks/picture_reading.py --workers 1 2 4 8

JPEG files of 1,600 x 1,200 pixels, 1,024 image tokens each, read by Qwen2.5-VL's image processor as a training step
reads them. Tensors of processes come back through shared memory. Prints one JSON line for each number of workers, with
medians of three.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from pictures import write_vision_checkpoint
from PIL import Image as Picture
from torch import Tensor

from automodel_rl.families.patch_images import PatchReader
from automodel_rl.hf.read import read_config

ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pictures", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)  # each worker is one of many
    with tempfile.TemporaryDirectory() as folder:
        loads = make_loads(Path(folder), options.pictures)
        for workers in options.workers:
            rates = {
                kind.__name__: round(pictures_a_second(kind(workers), loads), 1)
                for kind in (ThreadPoolExecutor, ProcessPoolExecutor)
            }
            print(json.dumps({"workers": workers, **rates}), flush=True)


def make_loads(folder: Path, count: int) -> list[Callable[[], Tensor]]:
    """Functions that read a picture each, as the images of a batch have them."""
    write_vision_checkpoint(folder / "model", ["What is this? It is a square."] * 20, tiny=True)
    reader = PatchReader(folder / "model", read_config(folder / "model"), (64 * 28**2, 1024 * 28**2))
    generator = np.random.default_rng(0)
    loads: list[Callable[[], Tensor]] = []
    for number in range(count):
        squares = generator.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        path = folder / f"{number}.jpg"
        Picture.fromarray(squares).resize((1600, 1200)).save(path, quality=90)
        loads.append(functools.partial(reader.load, str(path), "the benchmark"))
    return loads


def pictures_a_second(pool: Executor, loads: list[Callable[[], Tensor]]) -> float:
    seconds = []
    with pool:
        for _ in range(ROUNDS + 1):  # the first starts the workers
            start = time.perf_counter()
            for future in [pool.submit(load) for load in loads]:
                future.result()
            seconds.append(time.perf_counter() - start)
    return len(loads) / statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
