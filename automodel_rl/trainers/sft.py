"""Supervised fine-tuning, from a config to a Hugging Face checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from automodel_rl.batch import PackedBatch
from automodel_rl.config import SFTConfig, SourceConfig
from automodel_rl.data.chat import ChatTokenizer, load_tokenizer
from automodel_rl.data.examples import ChatDataset
from automodel_rl.data.loader import PackedLoader
from automodel_rl.engine import Engine
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.report import Sample
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.rollout.greedy import greedy_completions
from automodel_rl.trainers.run import Run, count_steps, first_loaded, overlong_warning, unweighted, where


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
        directory = RunDirectory(config, config.output, resume)
        self.handle = ModelHandle.from_pretrained(config.model, config.parallel, config.memory)
        torch.manual_seed(config.seed + dist.get_rank())
        self.tokenizer = load_tokenizer(self.handle.source, config.data, self.handle.config.vocab_size)
        self.chat = ChatTokenizer(self.tokenizer, config.data.train_on)
        seed = config.seed if config.data.shuffle else None
        self.loader = self._loader(config.data.train, seed, config.length.epochs)
        self.validation = self._validation_rows()
        total_steps = count_steps(config.length, self.loader.sampler)
        self.engine = Engine(self.handle, config.optimizer, total_steps)
        self.run = Run(config, directory, self.engine, total_steps, lambda: {"loader": self.loader.state_dict()})
        if resume and (state := self.run.resume()):
            self.loader.load_state_dict(state["loader"])

    def train(self) -> Path:
        """Runs to the end.

        Returns:
            The folder of the trained Hugging Face checkpoint.

        Raises:
            StoppedError: SIGTERM or Ctrl-C came; a checkpoint is saved.
        """
        batches = iter(()) if self.run.is_over else first_loaded(self.loader)
        warning = overlong_warning(self.config.batch.row_tokens)
        for step in self.run.steps(self._summary()):
            with step.time("data"):
                packed = next(batches)
            with step.time("train"):
                output = self.engine.train_step(packed.batches, sft_loss)
            step.record([output])
            step.record_performance(packed, self.config.batch.row_tokens)
            if self.validation and self.run.validates:
                with step.time("validate"):
                    step.row["val/loss"], _ = self.engine.evaluate(self.validation, sft_loss)
            if text := warning(packed):
                self.run.say(text)
        self.handle.save_pretrained(self.run.directory.final, self.tokenizer)
        return self.run.finish(f"SFT of {self.config.model.path}", self._samples())

    def _summary(self) -> str:
        sampler = self.loader.sampler
        return f"{sampler.batch_size} chats a step, of {sum(sampler.sizes):,}, {where(self.config, self.handle)}"

    def _loader(self, sources: Sequence[SourceConfig], seed: int | None, epochs: float | None) -> PackedLoader:
        config = self.config
        return PackedLoader(
            ChatDataset(sources, self.chat, config.batch.row_tokens, config.data.overlong),
            config.batch.sequences,
            self.handle.layout,
            self.handle.flops,
            num_workers=config.data.num_workers,
            seed=seed,
            epochs=epochs,
        )

    def _validation_rows(self) -> list[PackedBatch]:
        if not self.config.data.validation:
            return []
        loader = self._loader(unweighted(self.config.data.validation), seed=None, epochs=1)
        return [row for packed in loader for row in packed.batches]

    def _samples(self) -> list[Sample]:
        """Greedy completions for the first examples of the validation data, else of the training data."""
        config = self.config
        sources = config.data.validation or config.data.train
        dataset = ChatDataset(sources, self.chat, config.batch.row_tokens, config.data.overlong)
        chats = [dataset.record((0, i)) for i in range(min(config.observe.samples, len(dataset.sources[0])))]
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
