"""`automodel-rl watch`: a small server on the loopback address that shows runs live."""

import json
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from automodel_rl.errors import InputError
from automodel_rl.observe.metrics import read_lines
from automodel_rl.observe.run_files import RunFiles
from automodel_rl.origins import foreign_page_error
from automodel_rl.report.page import page
from automodel_rl.report.rollouts import groups_of
from automodel_rl.report.run_data import read_run

ADDRESS = "127.0.0.1"
FIRST_PORT = 6060


class RunServer(ThreadingHTTPServer):
    """HTTP server for the report page. Started with `serve_forever`.

    Args:
        folders: the runs' folders, which need not exist yet.
        port: 0 for any free port; None for the first free one from `FIRST_PORT`.

    Raises:
        InputError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int | None):
        self.folders = folders
        tried = range(FIRST_PORT, FIRST_PORT + 20) if port is None else [port]
        for number in tried:
            try:
                super().__init__((ADDRESS, number), _Handler)
                return
            except (OSError, OverflowError) as error:
                problem = error
        raise InputError(f"--port {tried[-1]}: cannot be used ({problem}): choose another")

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


_STEP_READERS: dict[str, Callable[[RunFiles, str], Any]] = {
    "/rollouts": lambda files, name: groups_of(files.rollouts / name),
    "/timeline": lambda files, name: read_lines(files.timelines / name),
}
"""Data of one step by URL path: functions of the run's files and the step's file name."""


class _Handler(BaseHTTPRequestHandler):
    server: RunServer

    def do_GET(self) -> None:
        """Serves the page at /, all runs at /data, a step's groups at /rollouts?run=R&step=N, and its lanes at
        /timeline?run=R&step=N."""
        why = foreign_page_error(ADDRESS, self.headers.get("Host", ""), self.headers.get("Origin"))
        if why:
            self.send_error(403, why)
            return
        url = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path == "/":
            self._answer("text/html", page(None))
        elif url.path == "/data":
            self._data(asked.get("state", ""))
        elif url.path in _STEP_READERS and asked.get("run", "").isdecimal() and asked.get("step", "").isdecimal():
            self._of_step(_STEP_READERS[url.path], int(asked["run"]), int(asked["step"]))
        elif url.path == "/favicon.ico":
            self._answer("image/x-icon", "")
        else:
            self.send_error(404)

    def _data(self, known: str) -> None:
        """Sends all runs, or null if the browser has their current state."""
        state = "-".join(_state(folder) for folder in self.server.folders)
        if state == known:
            self._answer("application/json", "null")
            return
        runs = []
        for folder in self.server.folders:
            try:
                runs.append(read_run(folder, rollouts=False))
            except InputError:  # the run has not started
                runs.append({"name": folder.name, "folder": str(folder), "status": "waiting"})
        self._answer("application/json", json.dumps({"written": time.time(), "state": state, "runs": runs}))

    def _of_step(self, read: Callable[[RunFiles, str], Any], run: int, step: int) -> None:
        if run >= len(self.server.folders):
            self.send_error(404)
            return
        self._answer("application/json", json.dumps(read(RunFiles(self.server.folders[run]), f"step_{step}.jsonl")))

    def _answer(self, kind: str, content: str) -> None:
        encoded = content.encode("utf-8", "replace")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(encoded)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: the page polls every few seconds."""


def _state(folder: Path) -> str:
    """A text that changes when a run makes progress or ends."""
    files = RunFiles(folder)
    watched = (files.metrics, files.failure, files.config_file, files.finished_file)
    return f"{files.is_in_use()}" + ".".join(str(f.stat().st_mtime_ns) for f in watched if f.is_file())
