"""Supervised fine-tuning, from a config to a Hugging Face checkpoint."""

import itertools
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from automodel_rl.config import SFTConfig
from automodel_rl.data.chat import ChatTokenizer, load_tokenizer
from automodel_rl.data.loader import ChatDataset, PackedLoader, PackedStep
from automodel_rl.engine import Engine
from automodel_rl.engine.checkpoint import load_checkpoint, save_checkpoint
from automodel_rl.errors import InputError, StoppedError
from automodel_rl.launch.stop_signal import StopSignal
from automodel_rl.losses import sft_loss
from automodel_rl.model.checkpoint_files import resolve_checkpoint
from automodel_rl.model.flops import peak_flops
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.console import Progress
from automodel_rl.observe.metrics import MetricsFile, read_metrics
from automodel_rl.observe.report import Sample, write_report
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.parallel.host_reduce import any_rank
from automodel_rl.rollout.greedy import greedy_completions


class SFTTrainer:
    """Fine-tunes on chats. Every rank of the job makes one and calls `train`.

    Args:
        config: the run.
        resume: go on from the newest checkpoint in the run directory, or start if there is none.

    Raises:
        InputError: something in the config, the data or the checkpoint is wrong. Nothing has been written.
    """

    def __init__(self, config: SFTConfig, resume: bool = False):
        self.config = config
        self.directory = RunDirectory(config, config.output, resume)
        self.handle = ModelHandle.from_pretrained(config.model, config.parallel, config.memory)
        self.layout = self.handle.layout
        torch.manual_seed(config.seed + dist.get_rank())
        self.tokenizer = load_tokenizer(resolve_checkpoint(config.model.path), config.data)
        vocab_size = self.handle.config.vocab_size
        if len(self.tokenizer) > vocab_size:
            raise InputError(
                f"model.path={config.model.path}: the tokenizer has {len(self.tokenizer)} tokens but the model's "
                f"vocabulary is {vocab_size}: use the tokenizer that belongs to the model"
            )
        self.chat = ChatTokenizer(self.tokenizer, config.data.train_on)
        self.loader = self._loader(
            config.data.train, config.seed if config.data.shuffle else None, config.length.epochs
        )
        self.validation = self._validation_rows()
        self.total_steps = config.length.steps or len(self.loader.sampler)
        if self.total_steps == 0:
            raise InputError(f"length.epochs={config.length.epochs} is less than one example: raise it, or give steps")
        self.engine = Engine(self.handle, config.optimizer, self.total_steps)
        self.best: dict[str, float] | None = None
        self.overlong_mentioned = False
        if resume:
            self._resume()

    def train(self) -> Path:
        """Runs to the end.

        Returns:
            The folder of the trained Hugging Face checkpoint.

        Raises:
            StoppedError: SIGTERM or Ctrl-C came; a checkpoint is saved.
        """
        steps = self._start_loading()
        if self._is_first_rank:
            self.directory.create()
            metrics = MetricsFile(self.directory.metrics, self.engine.step)
        with StopSignal() as stop, Progress(self.total_steps, self.engine.step, not self._is_first_rank) as progress:
            progress.say(self._summary())
            while not self._is_over:
                started = time.perf_counter()
                step = next(steps)
                loaded = time.perf_counter()
                output = self.engine.train_step(step.batches, sft_loss)
                row = {
                    "step": self.engine.step,
                    "train/loss": output.loss,
                    "train/grad_norm": output.grad_norm,
                    "train/lr": output.lr,
                    "train/num_tokens": output.num_tokens,
                    "train/skipped": int(output.skipped),
                    **output.metrics,
                    **self._performance(step, started, loaded),
                }
                if self.validation and (self._is_over or self._is_due(self.config.length.validate_every)):
                    row["val/loss"] = self.engine.evaluate(self.validation, sft_loss)
                if self._is_first_rank:
                    metrics.write(row)
                progress.show(row)
                self._mention_overlong(step, progress)
                stopping = any_rank(bool(stop), self.layout)
                if stopping or self._is_due(self.config.checkpoint.every):
                    self._save_checkpoint(row.get("val/loss", math.inf))
                if stopping:
                    signal = stop.name or "a signal to another rank"
                    raise StoppedError(f"stopped by {signal} after step {self.engine.step}: add --resume auto to go on")
            return self._finish(progress)

    def _start_loading(self) -> Iterator[PackedStep]:
        """The steps; the first is loaded now, so that what is wrong with it comes out before anything is written."""
        steps = iter(self.loader)
        return steps if self._is_over else itertools.chain([next(steps)], steps)

    def _summary(self) -> str:
        """One line on what runs, for the console."""
        parallel = self.config.parallel
        layout = " x ".join(f"{name} {size}" for name, size in parallel.sizes.items()) or "one rank"
        start = f"from step {self.engine.step} to" if self.engine.step else "over"
        examples = sum(self.loader.sampler.sizes)
        return (
            f"{examples:,} examples, {start} {self.total_steps} steps of {self.config.batch.sequences}, {layout}, "
            f"{self.config.model.dtype} on {self.layout.device.type}, in {self.directory.folder}"
        )

    def _mention_overlong(self, step: PackedStep, progress: Progress) -> None:
        """Says once that examples are cut or left out; metrics.jsonl has the counts of every step."""
        if self.overlong_mentioned or not step.num_truncated + step.num_dropped:
            return
        self.overlong_mentioned = True
        progress.say(
            f"warning: of {step.num_sequences + step.num_dropped} examples in step {self.engine.step}, "
            f"{step.num_truncated} were truncated to batch.row_tokens={self.config.batch.row_tokens} and "
            f"{step.num_dropped} dropped; metrics.jsonl counts them in every step"
        )

    def _finish(self, progress: Progress) -> Path:
        self.handle.save_pretrained(self.directory.final, self.tokenizer)
        samples = self._samples()
        if self._is_first_rank:
            rows = read_metrics(self.directory.metrics)
            write_report(self.directory.report, f"SFT of {self.config.model.path}", rows, samples)
        progress.say(f"model: {self.directory.final}\nreport: {self.directory.report}")
        return self.directory.final

    def _is_due(self, every: int | None) -> bool:
        """Whether something that happens `every` so many steps, and at the end, happens now."""
        return every is not None and (self.engine.step % every == 0 or self._is_over)

    @property
    def _is_over(self) -> bool:
        return self.engine.step >= self.total_steps

    def _performance(self, step: PackedStep, started: float, loaded: float) -> dict[str, Any]:
        seconds = time.perf_counter() - started
        peak = peak_flops(self.layout.device)
        return {
            "data/num_sequences": step.num_sequences,
            "data/num_truncated": step.num_truncated,
            "data/num_dropped": step.num_dropped,
            "perf/tokens_per_second": step.num_tokens / seconds,
            "perf/mfu": step.flops / (seconds * peak * dist.get_world_size()) if peak else None,
            "perf/packing_efficiency": step.num_tokens / (step.num_rows * self.config.batch.row_tokens),
            "time/data_s": loaded - started,
            "time/step_s": seconds,
            "memory/peak_gib": self._peak_memory() / 2**30,
        }

    def _peak_memory(self) -> int:
        if self.layout.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.layout.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _save_checkpoint(self, val_loss: float) -> None:
        """Args: val_loss of this step, infinite if it has not validated."""
        if val_loss < (self.best["loss"] if self.best else math.inf):
            self.best = {"step": self.engine.step, "loss": val_loss}
        folder = self.directory.checkpoints / f"step_{self.engine.step}"
        save_checkpoint(self.engine, folder, {"best": self.best}, {"loader": self.loader.state_dict()})
        if self._is_first_rank:
            keep = set(self.directory.list_checkpoints()[-self.config.checkpoint.keep_last :])
            if self.config.checkpoint.keep_best and self.best is not None:
                keep.add(self.directory.checkpoints / f"step_{self.best['step']}")
            self.directory.keep_checkpoints(keep)

    def _resume(self) -> None:
        checkpoints = self.directory.list_checkpoints()
        if checkpoints:
            progress, rank_state = load_checkpoint(self.engine, checkpoints[-1])
            self.best = progress["best"]
            self.loader.load_state_dict(rank_state["loader"])

    def _loader(self, sources: Any, seed: int | None, epochs: float | None) -> PackedLoader:
        config = self.config
        return PackedLoader(
            sources, self.chat, config.data, config.batch, self.layout, self.handle.flops, seed=seed, epochs=epochs
        )

    def _validation_rows(self) -> list:
        if not self.config.data.validation:
            return []
        loader = self._loader(self.config.data.validation, seed=None, epochs=1)
        return [row for step in loader for row in step.batches]

    def _samples(self) -> list[Sample]:
        """Greedy completions for the first examples of the validation data, else of the training data."""
        config = self.config
        sources = config.data.validation or config.data.train
        dataset = ChatDataset(sources, self.chat, config.batch.row_tokens, config.data.overlong)
        chats = [dataset.messages((0, i)) for i in range(min(config.observe.samples, len(dataset.sources[0])))]
        prompts = [self.chat.prompt(messages, where) for messages, where in chats]
        # A chat may start with the assistant, and a prompt may be longer than any row that was trained.
        fitting = [i for i, prompt in enumerate(prompts) if 0 < len(prompt) < config.batch.row_tokens]
        written = greedy_completions(
            self.engine, [prompts[i] for i in fitting], config.observe.sample_tokens, {self.tokenizer.eos_token_id}
        )
        return [
            Sample(
                prompt=self.tokenizer.decode(prompts[i]),
                completion=self.tokenizer.decode(ids),
                expected=next(str(m.get("content")) for m in reversed(chats[i][0]) if m["role"] == "assistant"),
            )
            for i, ids in zip(fitting, written, strict=True)
        ]

    @property
    def _is_first_rank(self) -> bool:
        return dist.get_rank() == 0
