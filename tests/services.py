"""A service that tests start, with a tiny model, and clients of it."""

import asyncio
import contextlib
import gc
import inspect
import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tinker
import torch
import yaml
from tinker import types
from tinker.lib import internal_client_holder

from automodel_rl.config import LoraConfig
from automodel_rl.quickstart.model import train_tokenizer
from automodel_rl.serve.saved_weights import SavedWeights
from tests.processes import Job, Patience
from tests.tiny import save_tiny_model

VOCAB = 288


def heartbeats(url: str) -> int:
    """Number of this process's clients that tell a server every ten seconds that they are there."""
    loop = internal_client_holder._internal_client_holder_thread_singleton.get_loop()
    beating = [task.get_coro() for task in asyncio.all_tasks(loop)]
    holders = [inspect.getcoroutinelocals(one)["self"] for one in beating if one.__name__ == "_session_heartbeat"]
    return sum(one._base_url == url for one in holders)


def write_model(folder: Path, dtype: torch.dtype = torch.float64) -> None:
    """A tiny model with a tokenizer."""
    save_tiny_model(folder, num_layers=2, dtype=dtype, vocab_size=VOCAB)
    train_tokenizer(["1 + 2 is 3", "4 + 5 is 9"], VOCAB).save_pretrained(folder)


class Service:
    """`automodel-rl serve` as a process. A context manager.

    Args:
        folder: the service's folder; one that is there already is gone on with.
        base: folder of the model.
        settings: keys of the config, in place of those here.
    """

    def __init__(self, folder: Path, base: Path, **settings: Any):
        values = {
            "output": str(folder / "service"),
            "model": {"path": str(base), "dtype": "float64", "lora": {"rank": 8}},
            "parallel": {"pp": 2},
            "microbatch_tokens": 64,
            "port": 0,
            **settings,
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "serve.yaml"
        self.config.write_text(yaml.safe_dump(values))
        self.key_file, self.model = folder / "service" / "key", str(base)
        self.clients: list[Any] = []

    def __enter__(self) -> "Service":
        self.job = Job([sys.executable, "-m", "automodel_rl", "serve", str(self.config)])
        self.job.__enter__()
        patience = Patience(self.job.processes)
        while "export TINKER_BASE_URL=" not in self.job.stdout:
            assert self.job.process.poll() is None, self.job.stderr
            assert not patience.is_over, self.job.stderr
            time.sleep(0.05)
        self.url = self.job.stdout.split("TINKER_BASE_URL=")[1].split()[0]
        self.key = self.key_file.read_text().strip()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"the service said:\n{self.job.stdout}\n{self.job.stderr}")
        self.close_clients(is_alive=error is None and self.job.process.poll() is None)
        self.job.__exit__()
        patience = Patience(list)
        while error is None and heartbeats(self.url):
            assert not patience.is_over, "a client outlives its server: it would complain of it in another test"
            time.sleep(0.01)

    def close_clients(self, *, is_alive: bool = True) -> None:
        """Closes the clients that were made, and with them their sockets, which would be noticed in another test.

        Args:
            is_alive: whether the service answers; if not, clients would look for it to the end of all tests.
        """
        for client in self.clients:
            if is_alive:
                with contextlib.suppress(TimeoutError):  # its last task may miss that it is cancelled (CPython 86296)
                    client.close("success").result(timeout=20)
            else:
                client.holder.close()
        self.clients.clear()
        gc.collect()

    def client(self) -> Any:
        """A client of the package `tinker`."""
        self.clients.append(tinker.ServiceClient(base_url=self.url, api_key=self.key))
        return self.clients[-1]

    def folder_of(self, path: str) -> Path:
        """The folder of saved weights."""
        return SavedWeights(self.key_file.parent / "weights", math.inf, LoraConfig(), "")[path].folder

    def run(self, rank: int = 4, seed: int = 0, **options: Any) -> Any:
        """A training client, of a service client of its own."""
        client = self.client()
        return client.create_lora_training_client(base_model=self.model, rank=rank, seed=seed, **options).result()


def datum(length: int, seed: int, **inputs: Any) -> types.Datum:
    """Random tokens with random inputs of every loss, or those given. Targets are not always the next token."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCAB, length + 1)
    targets = tokens[1:].copy()
    targets[: length // 3] = 0
    values = {
        "target_tokens": targets.tolist(),
        "weights": random.normal(size=length).astype(np.float32).tolist(),
        "advantages": (random.normal(size=length) * (random.random(length) < 0.7)).astype(np.float32).tolist(),
        "logprobs": (random.normal(size=length) * 0.2 - 5.5).astype(np.float32).tolist(),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs={**values, **inputs}
    )


def of_loss(one: types.Datum, *names: str) -> types.Datum:
    """A datum with the inputs of one loss."""
    return types.Datum(
        model_input=one.model_input,
        loss_fn_inputs={name: one.loss_fn_inputs[name] for name in ("target_tokens", *names)},
    )
