"""Request handling: sessions, training runs, samplers, and the jobs for the ranks."""

import asyncio
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from automodel_rl.config import ServeConfig
from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.serve import checks
from automodel_rl.serve.history import ServiceHistory
from automodel_rl.serve.lists import Lists
from automodel_rl.serve.messages import (
    Datum,
    Forget,
    RunMethodCall,
    RunPass,
    RunShape,
    ServiceJob,
    Stop,
)
from automodel_rl.serve.ranks import Ranks, RanksLostError, RefusedError
from automodel_rl.serve.requests import (
    CreateModelBody,
    LoadBody,
    NewSessionBody,
    OptimStepBody,
    SaveBody,
    SequencedBody,
)
from automodel_rl.serve.results import Result, Results, digest_of, failed, finish
from automodel_rl.serve.samplers import Samplers
from automodel_rl.serve.saved_weights import Kind, Saved, SavedWeights, UnwritableError, about, remove_folder
from automodel_rl.serve.tables import BusyError, ServedRun, Session, Throughput, UnknownError, Weights, choose_rows
from automodel_rl.serve.wire import bytes_of_arrays, read_data, write_output

MISSING_REQUEST_SECONDS = 120.0
"""Longest wait for a missing request after later ones of its run have arrived."""

MAX_SESSIONS = 1000
"""Most sessions at once."""

Work = tuple[ServiceJob, Callable[[Any], Result]]
"""A job, and a function that converts its answer to a result."""


class Service:
    """State of the server. All methods are called in its event loop."""

    def __init__(self, config: ServeConfig, ranks: Ranks, saved: SavedWeights):
        self.config, self.ranks, self.saved = config, ranks, saved
        limits = config.limits
        self.results = Results(60 * limits.result_minutes, limits.waiting, int(limits.waiting_gib * 2**30))
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, ServedRun] = {}
        self.samplers, self.lists = Samplers(self), Lists(self)
        self.is_stopping = False
        self.throughput, self.history, self._sampled = Throughput(), ServiceHistory(), 0
        self._tasks: set[asyncio.Task] = set()

    # Sessions

    def create_session(self, body: NewSessionBody) -> dict[str, Any]:
        if len(self.sessions) >= MAX_SESSIONS:
            raise BusyError(f"there are already {len(self.sessions)} sessions: end one, or try again later")
        session = secrets.token_hex(8)
        self.sessions[session] = Session(
            time.monotonic(), user_metadata=body.user_metadata, display_name=body.display_name
        )
        note = "this server's adapters do not train the unembedding: train_unembed is ignored"
        return {"session_id": session, "warning_message": note}

    def heartbeat(self, session: str) -> dict[str, Any]:
        self.session(session).seen = time.monotonic()
        return {}

    def finish_session(self, session: str) -> dict[str, Any]:
        self.session(session)
        self._end_session(session)
        return {}

    def record_snapshot(self, seconds: float) -> None:
        """Records a snapshot of the server, `seconds` after the previous one."""
        sampled, self._sampled = self.history.num_sampled - self._sampled, self.history.num_sampled
        ranks = self.ranks
        self.history.record_snapshot(ranks.num_waiting, self.throughput.per_second, sampled / seconds, ranks.peak_bytes)

    def tidy(self) -> None:
        """Ends inactive sessions, fails requests whose turn cannot come, evicts old results, and deletes expired
        weights."""
        now = time.monotonic()
        longest = 60 * self.config.limits.session_minutes
        for session in [name for name, one in self.sessions.items() if now - one.seen > longest]:
            self._end_session(session)
        for run in self.runs.values():
            if run.waiting and now - run.since > MISSING_REQUEST_SECONDS:
                run.lost = run.lost or (
                    f"request {run.next} of this run never arrived, so later ones cannot run: load saved weights into "
                    "a new run"
                )
                run.next = min(run.waiting)
                self._advance(run)
        self.results.forget_old()
        for path in self.saved.expired:
            try:
                self.delete(path)
            except UnwritableError as error:
                print(f"warning: {error}; retrying in an hour", file=sys.stderr, flush=True)
                self.saved.set_expiry(path, 3600)

    def _end_session(self, session: str) -> None:
        self.sessions.pop(session, None)
        runs = [name for name, run in self.runs.items() if run.session == session]
        gone = [self.runs.pop(name) for name in runs]
        for name in runs:
            self.history.runs.pop(name, None)
        for run in gone:
            run.lost = "the session of this run has ended"
            for start in run.waiting.values():
                start()
        kept = tuple(name for run in gone for name in run.kept)
        table = self.samplers.table
        for sampler in [name for name, weights in table.items() if name.startswith(session) or weights.kept in kept]:
            del table[sampler]
        if runs or kept:
            self.ranks.submit(Forget(tuple(runs), kept))

    # Runs

    def create_model(self, body: CreateModelBody) -> dict[str, Any]:
        shape = checks.shape_of(body, self.config)
        return self._new_run(body, shape, body.user_metadata, lambda run, shape: RunMethodCall(run, "create", (shape,)))

    def info(self, model_id: str) -> dict[str, Any]:
        run, name = self._run(model_id), self.config.base_name
        data = {"model_name": name, "tokenizer_id": name}
        return {
            "model_id": model_id,
            "model_data": data,
            "model_name": name,
            "is_lora": run.shape.rank > 0,
            "lora_rank": run.shape.rank or None,
        }

    def forward_backward(self, message: Any) -> dict[str, Any]:
        def checked() -> Work:
            try:
                return work()
            except InputError:
                if not message.forward_only:
                    self.ranks.submit(RunMethodCall(message.model_id, "mark_failed"))
                raise

        def work() -> Work:
            loss, settings = checks.loss_of(message)
            data = checks.for_loss(read_data(message.data, self.config.limits.sequences, self.config.max_bytes), loss)
            checks.check_data(data, loss, self.config, self.ranks.vocab_size)
            shape = self.runs[message.model_id].shape
            job = RunPass(message.model_id, loss, settings, data, message.forward_only, shape)
            return job, lambda answer: done(answer, data)

        def done(answer: Any, data: list[Datum]) -> Result:
            if not message.forward_only:
                self.throughput.add(self.history.of_run(message.model_id).add_pass(answer.loss, data))
            return write_output(answer.logprobs, {"loss:sum": answer.loss})

        checks.check_numbers(message)
        body = message.SerializeToString(deterministic=True)
        size = len(body) + min(bytes_of_arrays(message), self.config.max_bytes)  # larger requests are refused
        return self._enqueue_in_order(
            message.model_id, message.seq_id, digest_of("forward_backward", body), checked, size
        )

    def optim_step(self, body: OptimStepBody) -> dict[str, Any]:
        def work() -> Work:
            if body.adam_params is None:
                raise InputError("optim_step needs adam_params: only AdamW is supported")

            def done(metrics: Any) -> Result:
                self.history.of_run(str(body.model_id)).add_step()
                return {"metrics": metrics}

            return RunMethodCall(str(body.model_id), "optimizer_step", (body.adam_params.settings,)), done

        return self._enqueue_in_order(body.model_id, body.seq_id, digest_of("optim_step", body), work)

    def save(self, body: SaveBody, kind: Kind) -> dict[str, Any]:
        run = self._run(body.model_id)

        def work() -> Work:
            if body.path is None:
                return self._keep(body, kind)
            saved = self.saved.new(body.model_id, kind, body.path, run.shape, body)

            def done(_: Any) -> Result:
                self._delete_later(self.saved.add(saved))
                return {"path": saved.path}

            return RunMethodCall(body.model_id, "save", (str(saved.folder), kind == "weights", about(saved))), done

        return self._enqueue_in_order(body.model_id, body.seq_id, digest_of(kind, body), work)

    def delete(self, path: str) -> None:
        """Deletes saved weights.

        Raises:
            InputError: there are none.
            UnwritableError: they cannot be marked as deleted on disk, and are kept.
        """
        self._delete_later(self.saved.take(path))

    def _delete_later(self, saved: Saved | None) -> None:
        """Deletes a folder once all jobs in the queue, which may read it, are done."""
        if saved is not None:
            folder = saved.folder
            self.ranks.submit(Forget()).add_done_callback(lambda _: remove_folder(folder))

    def _keep(self, body: SaveBody, kind: Kind) -> Work:
        """Keeps unnamed weights for sampling, and drops the run's oldest if there are too many."""
        if kind == "weights":
            raise InputError("save_weights needs path, the name of the saved weights")
        run, name = self._run(body.model_id), f"{body.model_id}:kept:{body.seq_id}"
        run.kept.append(name)
        self.samplers.table[name] = Weights(kept=name)
        old = [run.kept.popleft() for _ in range(len(run.kept) - self.config.limits.samplers_of_run)]
        if old:
            self.ranks.submit(Forget(kept=tuple(old)))
        return RunMethodCall(body.model_id, "keep", (name,)), lambda _: {"sampling_session_id": name}

    def load(self, body: LoadBody) -> dict[str, Any]:
        if body.model_id is None:
            if body.session_id is None or body.model_seq_id is None:
                raise InputError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
            if body.base_model is not None:
                checks.check_base_model(body.base_model, self.config)
            checks.check_optimizer(body.optimizer_config)
            saved = self._training_weights(body.path)
            metadata = body.user_metadata or saved.user_metadata
            folder, optimizer = str(saved.folder), body.optimizer
            return self._new_run(
                body, saved.shape, metadata, lambda run, shape: RunMethodCall(run, "load", (shape, folder, optimizer))
            )
        run = self._run(body.model_id)

        def work() -> Work:
            saved = self._training_weights(body.path)
            run.shape, run.lost = self._placed(saved.shape, str(body.model_id)), ""
            job = RunMethodCall(str(body.model_id), "load", (run.shape, str(saved.folder), body.optimizer))
            return job, lambda _: {"path": body.path, "model_id": body.model_id}

        if body.seq_id is None:
            raise InputError("load_weights with model_id needs seq_id")
        return self._enqueue_in_order(
            body.model_id, body.seq_id, digest_of("load_weights", body), work, 0, restores_run=True
        )

    def _training_weights(self, path: str) -> Any:
        saved = self.saved.usable(path)
        if "/weights/" not in path:
            raise InputError(f"{path}: has no optimizer state; resume training from weights of save_state")
        return saved

    def _new_run(
        self, body: Any, shape: RunShape, metadata: dict[str, Any] | None, make: Callable[[str, RunShape], ServiceJob]
    ) -> dict[str, Any]:
        session = self.session(body.session_id)
        session.seen = time.monotonic()
        name = f"{body.session_id}:train:{body.model_seq_id}"  # the client derives the same name
        request, digest = f"{name}:0", digest_of(type(body).__name__, body)
        if not self.results.repeats(request, digest):
            alive, most = sum(not run.lost for run in self.runs.values()), self.config.max_runs
            if alive >= most:
                remedy = (
                    "because the server trains all weights"
                    if self.config.model.lora is None
                    else "or raise limits.runs"
                )
                raise BusyError(f"there are {alive} runs, and the limit is {most}: end one, {remedy}")
            run = ServedRun(body.session_id, self._placed(shape, name), metadata)
            self.start(request, digest, run, make(name, run.shape), lambda _: {"model_id": name})
            self.runs[name] = run
            self.results.find(request).add_done_callback(
                lambda result: self._mark_creation_failed(name, result.result())
            )
        return {"request_id": request, "model_id": name}

    def _placed(self, shape: RunShape, name: str) -> RunShape:
        """Assigns the run adapter rows that no other run uses, if possible, so that it can share passes."""
        lora = self.config.model.lora
        others = [run for other, run in self.runs.items() if other != name and not run.lost]
        return shape if lora is None else replace(shape, first=choose_rows(others, shape.rank, lora.rank))

    def _mark_creation_failed(self, name: str, result: Result) -> None:
        """Marks a run as lost if its creation failed, so that it does not count as alive."""
        if name in self.runs and isinstance(result, dict) and "error" in result:
            self.runs[name].lost = self.runs[name].lost or f"the run was not created: {result['error']}"

    def refuse(self, turn: SequencedBody, body: bytes, text: str) -> dict[str, Any]:
        """Makes an invalid request take its turn and fail, as later requests wait for that turn."""

        def work() -> Work:
            raise InputError(text)

        return self._enqueue_in_order(turn.model_id, turn.seq_id, digest_of("", body), work)

    def _enqueue_in_order(
        self,
        model_id: str,
        seq_id: int,
        digest: bytes,
        work: Callable[[], Work],
        size: int = 0,
        restores_run: bool = False,
    ) -> dict[str, Any]:
        """Queues a request of `size` bytes in its run's order. From here on it is not refused but fails at its turn,
        as others wait for it."""
        run, request = self._run(model_id), f"{model_id}:{seq_id}"
        answer = {"request_id": request, "model_id": model_id}
        if self.results.repeats(request, digest) or seq_id < run.next:
            return answer
        result = self.results.open(request, digest, size, is_early=seq_id > run.next)
        run.used = time.time()
        run.since = run.since if run.waiting else time.monotonic()
        if run.session in self.sessions:
            self.sessions[run.session].seen = time.monotonic()

        def begin() -> None:
            if run.lost and not restores_run:
                result.set_result(failed(run.lost))
                return
            try:
                job, convert = work()
            except (InputError, UnknownError) as error:
                result.set_result(failed(str(error)))
                return
            except Exception as error:  # the client must not wait forever
                result.set_result(failed(describe_root_cause(error), "server"))
                return
            self._watch(finish(result, self.ranks.submit(job), convert, lambda: run.lost))

        run.waiting[seq_id] = begin
        self._advance(run)
        return answer

    def _advance(self, run: ServedRun) -> None:
        while run.next in run.waiting:
            start = run.waiting.pop(run.next)
            run.next += 1
            run.since = time.monotonic()
            start()

    # Results

    async def retrieve(self, request: str, seconds: float) -> Result | None:
        """Returns the result of a request; None if it is not available within `seconds`."""
        result = self.results.find(request)
        done, _ = await asyncio.wait([result], timeout=seconds)
        return self.results.take_result(request) if done else None

    def start(
        self,
        request: str,
        digest: bytes,
        run: ServedRun | None,
        job: ServiceJob,
        convert: Callable[[Any], Result],
        size: int = 0,
    ) -> None:
        """Submits the job of a request outside of a run's order.

        Args:
            digest: from `digest_of`.
            run: the job's run, if any, for the error if the ranks are lost.
            convert: converts the job's answer to the result.
            size: upper bound on the request's memory, in bytes.

        Raises:
            BusyError: too many requests are waiting.
        """
        lost = (lambda: run.lost) if run is not None else (lambda: "the ranks exited while sampling: sample again")
        self._watch(finish(self.results.open(request, digest, size), self.ranks.submit(job), convert, lost))

    def _watch(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # End of the ranks

    def ranks_lost(self) -> None:
        """Records that the ranks have ended, and with them all unsaved state."""
        for name, run in self.runs.items():
            saved = self.saved.newest(name)
            remedy = "it has no saved weights: start a new run" if saved is None else f"resume from {saved.path}"
            run.lost = f"the ranks of the server exited and lost the state of the run {name}; {remedy}"
            for kept in run.kept:
                self.samplers.table.pop(kept, None)
            run.kept.clear()

    async def stop(self) -> list[str]:
        """Saves all runs and ends the ranks. Returns the paths of the saved weights, or errors."""
        if self.is_stopping:
            return []
        self.is_stopping = True
        try:
            return await self._save_all()
        finally:
            self.ranks.submit(Stop())

    async def _save_all(self) -> list[str]:
        paths = []
        for name, run in [*self.runs.items()]:
            if run.lost:
                continue
            body = SaveBody(model_id=name, seq_id=run.next, user_metadata=run.user_metadata)
            try:
                saved = self.saved.new(name, "weights", f"stopped-{run.next - 1}", run.shape, body)
                save = RunMethodCall(name, "save", (str(saved.folder), True, about(saved)))
                await asyncio.wrap_future(self.ranks.submit(save))
            except (InputError, RefusedError, RanksLostError) as error:
                paths.append(f"nothing of {name}: {error}")
                continue
            self.saved.add(saved)
            paths.append(saved.path)
        return paths

    def session(self, name: str) -> Session:
        """Returns a session. Raises UnknownError if there is none."""
        if name not in self.sessions:
            raise UnknownError(f"unknown session {name!r}: it has ended, or the server was restarted")
        return self.sessions[name]

    def _run(self, name: str) -> ServedRun:
        if name not in self.runs:
            saved = self.saved.newest(name)
            remedy = "" if saved is None else f"; its newest saved weights are {saved.path}"
            raise UnknownError(f"unknown training run {name!r}: it has ended, or the server was restarted{remedy}")
        return self.runs[name]
