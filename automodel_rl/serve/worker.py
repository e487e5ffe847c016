"""A rank of the service: it runs jobs, which rank 0 gets from the server and shares with the others."""

import os
import signal
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from automodel_rl.config import OptimizerConfig, ServeConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.launch.flight import flight
from automodel_rl.launch.stop_signal import stop_signals
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.peak_memory import peak_memory
from automodel_rl.serve.checks import check_model
from automodel_rl.serve.messages import (
    CreateRun,
    Done,
    Forget,
    ForwardBackward,
    Job,
    Keep,
    Load,
    Nothing,
    OptimizerStep,
    Ready,
    Refused,
    Sample,
    Save,
    Spoil,
    Stop,
    StopAsked,
    Together,
)
from automodel_rl.serve.runs import Runs
from automodel_rl.serve.sampler import Sampler, answers
from automodel_rl.serve.worker_address import ADDRESS_VARIABLE, KEY_VARIABLE

IDLE_SECONDS = 1.0
"""Longest wait for a job, after which ranks tell each other that all is well."""

NEVER = 1_000_000_000


class Worker:
    """Loads the model and runs jobs until the server ends.

    Args:
        config: the service's config.

    Raises:
        InputError: the model or the layout cannot be served.
    """

    def __init__(self, config: ServeConfig):
        model = OpenedModel.open(config.model)
        check_model(model)
        model.check_layout(config.parallel, config.memory)
        self.handle = ModelHandle.load(model, config.parallel, config.memory)
        self.engine = Engine(self.handle, OptimizerConfig(decay="constant", max_skipped_steps=NEVER))
        self.runs = Runs(self.engine, config.microbatch_tokens)
        self.sampler = Sampler(config, self.engine, model.tokenizer())
        self._shown: tuple[str | None, str | None] | None = None

    def work(self, signals: list[int]) -> None:
        """Runs jobs until one asks to stop. A collective.

        Args:
            signals: gets every signal to stop.
        """
        server = _connect() if dist.get_rank() == 0 else None
        if server is not None:
            server.send(Ready(self.handle.config.vocab_size))
        while True:
            if signals and server is not None:
                signals.clear()
                server.send(StopAsked())
            job = self._next(server)
            if isinstance(job, Stop):
                return
            if isinstance(job, Nothing):
                continue
            answer = self._answer(job)
            if server is not None:
                server.send(Done(answer, peak_memory(self.handle.layout.device)))

    def _next(self, server: Connection | None) -> Job:
        """The next job, the same on every rank."""
        box: list[Job] = [Nothing()]
        with flight.phase("waiting for a job"):
            if server is not None and server.poll(IDLE_SECONDS):
                box = [server.recv()]
            dist.broadcast_object_list(box, src=0, group=self.handle.layout.world_control)
        return box[0]

    def _answer(self, job: Job) -> Any:
        """The answer to a job. What all ranks refuse alike is refused; any other failure ends the ranks."""
        try:
            with flight.phase(type(job).__name__):
                return self._run(job)
        except InputError as error:
            self._shown = None
            return Refused(str(error))

    def _run(self, job: Job) -> Any:
        match job:
            case CreateRun(run, shape):
                return self.runs.create(run, shape)
            case ForwardBackward():
                return self.runs.forward_backward(job)
            case Together(jobs):
                return self.runs.together(jobs)
            case Spoil(run):
                return self.runs.spoil(run)
            case OptimizerStep(run, settings):
                return self.runs.optimizer_step(run, settings)
            case Save(run, folder, for_training, about):
                return self.runs.save(run, Path(folder), for_training, about)
            case Load(run, shape, folder, with_optimizer):
                return self.runs.load(run, shape, Path(folder), with_optimizer)
            case Keep(run, name):
                return self.runs.keep(run, name)
            case Forget(runs, kept):
                return self.runs.forget(runs, kept)
            case Sample():
                return self._sample(job)
        raise AssertionError(f"there is no job {type(job).__name__}")

    def _sample(self, job: Sample) -> Any:
        prompts = job.prompts
        scored = [place for place, prompt in enumerate(prompts) if prompt.with_logprobs]
        weights = (job.kept, job.folder)

        def show() -> None:
            self.runs.show(job.kept, None if job.folder is None else Path(job.folder), job.shape)

        if scored or weights != self._shown:  # kept and saved weights never change
            show()
        if weights != self._shown:
            self.sampler.take_weights(self.runs.trained.scale)
            self._shown = weights
        found = self.sampler.score([prompts[place] for place in scored]) if scored else []
        return answers(self.sampler.complete(prompts, show), dict(zip(scored, found, strict=True)))


def _noted_signals() -> list[int]:
    """A list that gets every signal to stop. Nothing else happens: the server ends the ranks once runs are saved."""
    noted: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda received, _: noted.append(received))
    return noted


def _connect() -> Connection:
    key = bytes.fromhex(os.environ[KEY_VARIABLE])
    return Client(os.environ[ADDRESS_VARIABLE], "AF_UNIX", authkey=key)


def serve_rank(config: ServeConfig) -> None:
    """Runs this rank to the end of the service."""
    signals = _noted_signals()  # also while the model is loaded
    Worker(config).work(signals)
