"""Starts the service: the ranks, and the HTTP server, which outlives them."""

import asyncio
import contextlib
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from automodel_rl.config import ServeConfig
from automodel_rl.errors import EXIT_OK, InputError, describe_root_cause
from automodel_rl.files import as_input_error, check_writable, write_private
from automodel_rl.serve.app import make_app
from automodel_rl.serve.ranks import Ranks
from automodel_rl.serve.saved_weights import SavedWeights
from automodel_rl.serve.service import Service

TIDY_SECONDS = 5.0


@dataclass(frozen=True)
class RanksStarter:
    """Starter of the service's ranks.

    Attributes:
        run: runs the ranks until they end, and returns their exit code.
        host: name of this machine for the ranks.
        restarts: most consecutive restarts of ranks that end before completing a job.
    """

    run: Callable[[], int]
    host: str = "localhost"
    restarts: int = 3


def serve(config: ServeConfig, starter: RanksStarter) -> int:
    """Runs the service until it is stopped, and returns the exit code.

    Ranks that end after having been ready are restarted; runs can then resume from saved weights.

    Raises:
        InputError: the address cannot be used, or the folder cannot be written.
    """
    folder = Path(config.output)
    check_writable(folder, f"output={folder}")
    key = config.key or _own_key(folder)
    listener = _listen(config)
    server = Server(config, key, starter.host)
    thread = threading.Thread(target=server.run, args=(listener,), daemon=True, name="http")
    thread.start()
    size = config.parallel.world_size
    print(f"loading {config.model.path} on {size} rank{'s' * (size > 1)} ...", flush=True)
    try:
        return _keep_ranks(server.ranks, starter)
    finally:
        server.end()
        thread.join(timeout=END_SECONDS)


def _keep_ranks(ranks: Ranks, starter: RanksStarter) -> int:
    """Runs ranks until the service ends, restarting them if they fail. Returns the exit code."""
    failures = 0
    while True:
        ranks.num_jobs = 0
        code = starter.run()
        ranks.drop()
        if code == EXIT_OK or (failures == 0 and not ranks.ready.is_set()) or failures >= starter.restarts:
            return code
        failures = 0 if ranks.num_jobs else failures + 1
        print("the ranks have exited; restarting them, runs can resume from saved weights", flush=True)


END_SECONDS = 10.0


class Server:
    """The HTTP server and the service behind it, in a separate event loop.

    Args:
        key: the key that clients send.
        host: name of this machine for ranks.
    """

    def __init__(self, config: ServeConfig, key: str, host: str):
        self.config, self.key = config, key
        self.loop = asyncio.new_event_loop()
        self.ranks = Ranks(
            self._in_loop(lambda: self.service.ranks_lost()), self._in_loop(self._stop), config.pass_tokens, host
        )
        folder, limit = Path(config.output) / "weights", config.limits.disk_gib * 2**30
        saved = SavedWeights(folder, limit, config.model.lora, config.model.path)
        self.service = Service(config, self.ranks, saved)
        app = make_app(self.service, config, key)
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        )
        self._tasks: set[Any] = set()

    def run(self, listener: socket.socket) -> None:
        """Serves requests from when the ranks are ready until `end`."""
        asyncio.set_event_loop(self.loop)
        self.ranks.ready.wait()
        if self.uvicorn.should_exit:
            return
        host, port = listener.getsockname()[:2]
        print(
            f"serving {self.config.base_name} on http://{host}:{port}\n"
            f"    export TINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY={self.key}\n"
            f"    http://{host}:{port}/?key={self.key} shows runs and queue; Ctrl-C saves all runs and exits",
            flush=True,
        )
        self.loop.create_task(self._tidy())
        self.loop.run_until_complete(self.uvicorn.serve(sockets=[listener]))

    def end(self) -> None:
        self.uvicorn.should_exit = True
        self.ranks.ready.set()
        self.ranks.close()

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            try:
                self.service.record_snapshot(TIDY_SECONDS)
                self.service.tidy()
            except Exception as error:  # retried at the next round
                print(f"warning: {describe_root_cause(error)}", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        async def stop() -> None:
            for path in await self.service.stop():
                print(f"saved {path}", flush=True)

        task = self.loop.create_task(stop())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _in_loop(self, work: Callable[[], None]) -> Callable[[], None]:
        def later() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(work)

        return later


def _listen(config: ServeConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.port))
    except OSError as error:
        raise InputError(
            f"host={config.host} port={config.port}: cannot listen there ({error.strerror}): choose another port"
        ) from None


def _own_key(folder: Path) -> str:
    """Returns the key in the service's folder, which is created at the first start. Only the user can read it."""
    file = folder / "key"
    with as_input_error(f"output={folder}"):
        key = file.read_text().strip() if file.is_file() else ""
        if not key.startswith("tml-"):
            key = f"tml-{secrets.token_hex(16)}"
            write_private(file, f"{key}\n")
    return key
