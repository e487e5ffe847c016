"""Supervised fine-tuning: from a config and chats to a Hugging Face checkpoint."""

from pathlib import Path

from automodel_rl.config.algorithms import SFTConfig
from automodel_rl.data.examples import ChatDataset
from automodel_rl.engine import Engine
from automodel_rl.losses import sft_loss
from automodel_rl.trainers.open_run import choose_loss, layout_summary, open_run
from automodel_rl.trainers.packed_data import PackedData
from automodel_rl.trainers.run import Goal, Run


class SFTTrainer:
    """Fine-tunes on chats. Every rank of the job makes one and calls `train`.

    Args:
        config: the run's config.
        resume: "auto" to go on from the newest checkpoint in the run directory, or begin if there is none; "never" to
            begin; or the folder of a checkpoint to go on from.
        max_minutes: minutes after which the run saves and stops; None for no limit.

    Raises:
        InputError: the config, the data or the checkpoint is wrong. Nothing has been written.

    Example:
        >>> SFTTrainer(load_config("my_sft.yaml")).train().name  # doctest: +ELLIPSIS
        loading ...
        1 steps: ...
        'final'
    """

    def __init__(self, config: SFTConfig, resume: str = "never", max_minutes: float | None = None):
        self.loss = choose_loss(config, sft_loss)
        config, directory, chat, self.handle = open_run(config, resume)
        self.config = config
        self.tokenizer = chat.tokenizer
        self.data = PackedData(config, ChatDataset, chat, self.handle)
        self.validation = [
            microbatch for step in self.data.every_record(config.data.validation) for microbatch in step.microbatches
        ]
        self.engine = Engine(self.handle, config.optimizer, self.data.total_steps)
        self.run = Run(config, directory, self.engine, Goal(self.data.total_steps, max_minutes))
        self.run.resume({"data": self.data.train})

    def train(self) -> Path:
        """Runs to the end.

        Returns:
            The folder of the trained Hugging Face checkpoint.

        Raises:
            StoppedError: the run was stopped by SIGTERM, SIGHUP, Ctrl-C or its time limit; a checkpoint is saved.
        """
        if self.run.is_finished:
            return self.run.leave_finished()
        self.run.save_examples(self.data.examples)
        data = iter(()) if self.run.is_over else self.data.steps()
        for step in self.run.steps(self._summary()):
            with step.time("data"):
                packed = next(data)
            with step.time("train"):
                output = self.engine.train_step(packed.microbatches, self.loss)
            step.record([output], packed.size)
            self.run.note_overlong(step, packed)
            if self.config.data.validation and self.run.validates:
                with step.time("validate"):
                    step.metrics["val/loss"], _ = self.engine.evaluate(self.validation, self.loss)
        self.run.save_model(self.tokenizer)
        self.run.save_samples(self.data.samples(self.engine, self.tokenizer, self.run.say))
        return self.run.finish()

    def _summary(self) -> str:
        sampler = self.data.train.sampler
        chats = f"{sampler.batch_size} chats a step, of {sum(sampler.sizes):,}"
        return f"{chats}, {layout_summary(self.config, self.handle)}"
