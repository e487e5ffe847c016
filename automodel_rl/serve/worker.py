"""Rank 0 of the service: receives the server's jobs and drives the other ranks."""

import os
import signal
from multiprocessing import AuthenticationError
from typing import Any

from automodel_rl.batch import Packing
from automodel_rl.config import OptimizerConfig, ServeConfig
from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.generators.fleet import Fleet
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.launch.authenticated import AuthenticatedConnection
from automodel_rl.launch.flight import flight
from automodel_rl.launch.stop_signal import stop_signals
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.peak_memory import peak_memory
from automodel_rl.policy.crew import POLICY, TreeCrew
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.sampled import Refused
from automodel_rl.rollout.sampler import Sampler
from automodel_rl.serve import messages
from automodel_rl.serve.checks import check_model
from automodel_rl.serve.messages import (
    CombinedPass,
    Done,
    Forget,
    Ready,
    RunMethodCall,
    RunPass,
    SampleJob,
    Stop,
    StopRequested,
    TeacherJob,
)
from automodel_rl.serve.passes import Passes
from automodel_rl.serve.runs import RUNS
from automodel_rl.serve.service_rank import SERVICE, ServiceRank
from automodel_rl.serve.teachers import ServiceTeachers
from automodel_rl.serve.worker_address import read_address

IDLE_SECONDS = 1.0
"""Longest wait for a job before the ranks exchange a heartbeat."""

NEVER = 1_000_000_000


class ServiceWorker:
    """Runs the server's jobs on rank 0, which drives the others."""

    def __init__(self, config: ServeConfig, crew: TreeCrew, rank: ServiceRank):
        handle = rank.policy.handle
        parallel = handle.layout.parallel
        packing = Packing(config.microbatch_tokens, parallel.num_data_ranks, parallel.pp, cost=handle.flops)
        self.crew, self.device, self.vocab_size = crew, handle.layout.device, handle.config.vocab_size
        self.policy, self.fleet = Policy(crew, packing, self.vocab_size), Fleet(crew)
        self.policy.begin(OptimizerConfig(decay="constant", max_skipped_steps=NEVER))
        crew.ask(SERVICE, "open_runs")
        self.fleet.start(config.generator_spec)
        self.passes = Passes(self.policy, rank.runs)
        self.sampler = Sampler(self.policy, self.fleet)
        self.teachers = ServiceTeachers(config, crew, rank.teachers)
        self._loaded_weights: tuple[str | None, str | None] | None = None

    def work(self, server: AuthenticatedConnection, signals: list[int]) -> None:
        """Runs jobs until told to stop. Signal handlers append to `signals`."""
        teacher_vocab_sizes = {name: policy.vocab_size for name, policy in self.teachers.policies.items()}
        server.send(Ready(self.vocab_size, teacher_vocab_sizes))
        while True:
            if signals:
                signals.clear()
                server.send(StopRequested())
            with flight.phase("waiting for a job"):
                has_come = server.poll(IDLE_SECONDS)
            if not has_come:
                self.crew.ask(POLICY, "ping")
                continue
            job = server.recv()
            if isinstance(job, Stop):
                return
            server.send(Done(self._answer(job), peak_memory(self.device)))

    def _answer(self, job: messages.ServiceJob) -> Any:
        """Returns the answer to a job. An InputError, which all ranks raise alike, becomes `Refused`; any other
        error ends the ranks."""
        try:
            with flight.phase(job.title):
                return self._run(job)
        except InputError as error:
            self._loaded_weights = None
            return Refused(str(error))

    def _run(self, job: messages.ServiceJob) -> Any:
        match job:
            case RunPass():
                return self.passes.forward_backward(job)
            case CombinedPass(asked):
                return self.passes.combined_pass(asked)
            case SampleJob():
                return self._sample(job)
            case TeacherJob(teacher, prompts):
                return self.teachers.answer(teacher, prompts)
            case RunMethodCall(run, method, arguments):
                return self.crew.ask(RUNS, method, run, *arguments)
            case Forget(runs, kept):
                return self.crew.ask(RUNS, "forget", runs, kept)
        raise AssertionError(f"unknown job {type(job).__name__}")

    def _sample(self, job: SampleJob) -> Any:
        prompts = job.prompts
        weights = (job.kept, job.folder)

        def show() -> None:
            self.crew.ask(SERVICE, "show", job.kept, job.folder, job.shape)

        if weights != self._loaded_weights or any(prompt.scoring.is_anything or prompt.num_top for prompt in prompts):
            show()  # weights under a name or in a folder never change
        if weights != self._loaded_weights:
            self.fleet.sync()
            self._loaded_weights = weights
        return self.sampler.answer(prompts, show)


def _connect_to_server() -> AuthenticatedConnection:
    address = read_address()
    try:
        return address.connect()
    except (AuthenticationError, OSError, EOFError) as error:
        raise InputError(
            f"the server at {address.host}:{address.port} cannot be reached ({describe_root_cause(error)}): allow the "
            "machines of ranks to connect to it on any port"
        ) from None


def _record_signals() -> list[int]:
    """Returns a list to which handlers append stop signals. The server ends the ranks once all runs are saved."""
    noted: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda received, _: noted.append(received))
    return noted


def _open_teacher(name: str, config: ServeConfig) -> OpenedModel:
    """Opens a further base model without loading its weights. Raises InputError if it cannot be served."""
    asked = config.teachers[name].further_model(f"teachers.{name}", config.model)
    try:
        opened = OpenedModel.open(asked.model)
        check_model(opened)
        opened.check_layout(config.parallel, config.memory)
    except InputError as error:
        raise InputError(f"{asked.key}: {error}") from None
    return opened


def serve_rank(config: ServeConfig) -> None:
    """Runs this rank until the service ends.

    Raises:
        InputError: the model or layout cannot be served, or the server cannot be reached.
    """
    signals = _record_signals()  # before the model loads
    server = _connect_to_server() if os.environ["RANK"] == "0" else None  # before slow work
    model = OpenedModel.open(config.model)
    check_model(model)
    model.check_layout(config.parallel, config.memory)
    opened_teachers = {name: _open_teacher(name, config) for name in config.teachers}
    handle = ModelHandle.load(model, config.parallel, config.memory)
    teachers = {
        name: ModelHandle.load(opened, config.parallel, config.memory, is_trained=False)
        for name, opened in opened_teachers.items()
    }
    rank = ServiceRank(handle, model.tokenizer(), teachers)
    crew = TreeCrew(handle.layout, rank.targets)
    if crew.rank:
        crew.follow()
        return
    try:
        assert server is not None
        ServiceWorker(config, crew, rank).work(server, signals)
    except BaseException as error:
        crew.end(error)
        raise
    crew.end()
