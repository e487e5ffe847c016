"""Broken configs and data: each one either trains, or ends with one line and exit code 2 and leaves nothing behind.

python -m tests.fuzz [--cases 2000] [--seed 0] [--case N]
"""

import argparse
import copy
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import yaml

from tests.distributed.trainers.runs import Settings, settings_of
from tests.processes import Patience

ALGORITHMS = ("sft", "sft", "dpo", "grpo")

LIMIT_SECONDS = 90.0
"""Most seconds of processor time that a case may use. A case that uses none has come to a halt."""

JUNK: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 0.5, -0.5, 2**31, 2**63, 10**30, -(2**63), 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), "", " ", "x", "x" * 5000, "\0", "../..", "/", "/dev/null", "~", "1e5"),
    *("null", "{}", "[", "é", "\ud7ff", "%s", "{x}", "none", "auto", [], {}, [[]], [None], {"x": 1}, [1, "a", {}]),
    *(["q_proj"], [0.9, 0.95], "2026-02-30", "package.module:function", "os:system", "json:loads"),
]

JUNK_TEXTS = ["\ud800", {"type": "image"}, [{"type": "image"}], [{"type": "text", "text": 3}], "word " * 20_000]

UNBOUNDED = ("steps", "epochs", "max_new_tokens", "sample_tokens", "max_refills", "samples")
"""Keys that may ask for more than anybody would wait for; large values of them are asked for elsewhere."""

TYPOS: tuple[Callable[[str], str], ...] = (
    str.upper,
    lambda s: s[:-1],
    lambda s: s + "s",
    lambda s: s.replace("_", "-"),
)


@dataclass(frozen=True)
class Case:
    """A case to run.

    Attributes:
        algorithm: the command.
        config: contents of the config file, perhaps not even text.
        data: contents of the training file.
        about: what was changed in them.
    """

    algorithm: str
    config: bytes
    data: bytes
    about: str


def make_case(number: int, seed: int, workspace: Path, folder: Path) -> Case:
    """A case that its number and the seed decide."""
    source = random.Random(seed * 1_000_003 + number)
    algorithm = source.choice(ALGORITHMS)
    settings = settings_of(algorithm, workspace, folder / "run")
    settings["length"] = {"steps": 1}
    settings["observe"] = {"samples": 0}
    data = Path(settings["data"]["train"][0]["path"]).read_bytes()
    settings["data"]["train"] = [{"path": str(folder / "data.jsonl")}]
    about = []
    if source.random() < 0.5:
        data = _break_data(source, data, about)
    else:
        for _ in range(source.choice((1, 1, 1, 2))):
            _break_settings(source, settings, about)
    config = yaml.safe_dump(settings, allow_unicode=True).encode("utf-8", "surrogatepass")
    if source.random() < 0.15:
        config = _break_bytes(source, config, about)
    return Case(algorithm, config, data, "; ".join(about))


def _break_settings(source: random.Random, settings: Settings, about: list[str]) -> None:
    """Changes a key at a random depth: its value, its name, or whether it is there."""
    section, path = settings, []
    while True:
        key = source.choice([*section] or ["new"])
        path.append(str(key))
        inner = section.get(key)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        if not isinstance(inner, dict) or not inner or source.random() < 0.3:
            break
        section = inner
    way = source.randrange(5)
    if way == 0:
        section.pop(key, None)
    elif way == 1:
        section[source.choice(TYPOS)(str(key))] = section.pop(key, None)
    elif way == 2:
        key = source.choice(_keys_nearby(path))
        section[key] = _junk(source, key)
    else:
        section[key] = _junk(source, str(key))
    about.append(f"{'.'.join(path)}: way {way}, now {str(section.get(key))[:60]!r}")


def _junk(source: random.Random, key: str) -> Any:
    value = copy.deepcopy(source.choice(JUNK))
    is_large = isinstance(value, int | float) and value > 3
    return 2 if key in UNBOUNDED and is_large else value


def _keys_nearby(path: list[str]) -> list[str]:
    """Keys that the example does not use."""
    keys = {
        "model": ["attention", "implementation", "frozen", "lora", "moe", "pickled_weights", "trust_remote_code"],
        "data": ["shuffle", "overlong", "num_workers", "chat_template", "train_on", "validation"],
        "optimizer": [
            "name",
            "muon",
            "betas",
            "eps",
            "weight_decay",
            "max_grad_norm",
            "min_lr_ratio",
            "max_skipped_steps",
        ],
        "rollout": ["generator", "temperature", "max_staleness", "stop", "warn_logprob_error"],
        "checkpoint": ["every_steps", "every_minutes", "keep_last", "keep_best", "async", "format"],
        "observe": ["trackers", "samples", "sample_tokens"],
        "loss": ["kl", "clip_high", "correction", "variant", "beta", "on_policy", "normalise"],
    }
    top = [
        "seed",
        "parallel",
        "memory",
        "checkpoint",
        "failures",
        "loss",
        "components",
        "loss_function",
        "router_replay",
    ]
    return keys.get(path[0], top) if len(path) > 1 else top


def _break_data(source: random.Random, data: bytes, about: list[str]) -> bytes:
    """Changes a JSON-lines file: its bytes, a line, or what a record holds."""
    lines = data.splitlines(keepends=True)
    place = source.randrange(len(lines))
    way = source.randrange(12)
    about.append(f"data, line {place + 1}: way {way}")
    if way == 0:
        return data[: source.randrange(len(data))]
    if way == 1:
        return _break_bytes(source, data, about)
    if way == 2:
        return data.decode().encode(source.choice(("utf-16", "utf-32", "utf-8-sig", "cp037")))
    if way == 3:
        lines[place] = json.dumps({"messages": "x" * 3_000_000, "prompt": "y" * 3_000_000}).encode() + b"\n"
    elif way == 4:
        lines[place] = b"[" * 100_000 + b"]" * 100_000 + b"\n"
    elif way == 5:
        lines[place] = b"\0" * source.randrange(1, 5000) + b"\n"
    elif way == 6:
        lines[place] = source.choice((b"null\n", b"[]\n", b"1\n", b'"x"\n', b"{}\n", b"NaN\n", b"1" * 9000 + b"\n"))
    elif way == 7:
        return source.choice((b"", b"\n\n", b" ", b"\0", b"\xff\xfe", b"\n" * 10_000))
    elif way == 8:
        lines[place] = lines[place].rstrip() * 2 + b"\n"
    else:
        record = json.loads(lines[place])
        _break_record(source, record, about)
        lines[place] = json.dumps(record).encode("utf-8", "surrogatepass") + b"\n"
    return b"".join(lines)


def _break_record(source: random.Random, record: Any, about: list[str]) -> None:
    """Changes something at a random depth of a record."""
    here = record
    while True:
        keys = [*here] if isinstance(here, dict) else [*range(len(here))]
        if not keys:
            return
        key = source.choice(keys)
        if not isinstance(here[key], dict | list) or not here[key] or source.random() < 0.25:
            break
        here = here[key]
    if source.random() < 0.2:
        del here[key]
    else:
        here[key] = copy.deepcopy(source.choice([*JUNK, *JUNK_TEXTS]))
    about.append(f"at {key!r}")


def _break_bytes(source: random.Random, content: bytes, about: list[str]) -> bytes:
    """Flips, cuts, doubles or inserts some bytes."""
    broken = bytearray(content)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(len(broken) or 1)
        way = source.randrange(4)
        if way == 0 and broken:
            broken[place] ^= 1 << source.randrange(8)
        elif way == 1:
            del broken[place : place + source.randrange(1, 40)]
        elif way == 2:
            broken[place:place] = source.choice(
                (b"\0", b"\xff", b"\x80", b"\n", b"\t", b": ", b"- ", b"&a *a", b"!!python/x")
            )
        else:
            broken[place:place] = broken[place : place + 30]
    about.append("bytes")
    return bytes(broken)


def run_case(case: Case, folder: Path) -> str:
    """ "trained" or "refused".

    Raises:
        AssertionError: it ended in another way.
    """
    from automodel_rl.cli import main
    from automodel_rl.launch.process_group import leave_process_group

    (folder / "config.yaml").write_bytes(case.config)
    (folder / "data.jsonl").write_bytes(case.data)
    before = {*folder.parent.rglob("*")} - {*(folder / "run").rglob("*"), folder / "run"}
    with _OutputTo(folder / "printed", folder / "errors"):
        code = main([case.algorithm, str(folder / "config.yaml")])
        leave_process_group()
    errors = (folder / "errors").read_text(errors="replace")
    if code == 0:
        return "trained"
    assert code == 2, f"exit code {code}: {errors[-2000:]}"
    lines = errors.splitlines()
    assert len(lines) == 1, errors[-2000:]
    assert lines[0].startswith("error: ")
    assert len(lines[0]) > 20, "the line says nothing"
    left = {*folder.parent.rglob("*")} - before - {folder / "printed", folder / "errors"}
    assert not left, f"left behind: {[str(path) for path in left][:5]}"
    return "refused"


class _OutputTo:
    """Within this block what the process prints, libraries in other languages included, goes to files."""

    def __init__(self, *files: Path):
        self.files = files

    def __enter__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.kept = [os.dup(1), os.dup(2)]
        for number, file in enumerate(self.files, start=1):
            with file.open("wb") as opened:
                os.dup2(opened.fileno(), number)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, kept in enumerate(self.kept, start=1):
            os.dup2(kept, number)
            os.close(kept)


def _serve(pipe: Connection, seed: int, workspace: Path) -> None:
    # As one rank that somebody has launched: a layout of several ranks is then refused, and starts none.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    os.chdir(workspace)  # a broken output may be the name of a folder
    from automodel_rl.launch.local import free_port

    while True:
        number = pipe.recv()
        os.environ["MASTER_PORT"] = str(free_port())
        folder = Path(tempfile.mkdtemp(prefix="fuzz_")) / "case"
        folder.mkdir()
        about = ""
        try:
            case = make_case(number, seed, workspace, folder)
            about = f"{case.algorithm}, {case.about}"
            answer, failure = run_case(case, folder), None
        except BaseException:
            answer, failure = "failed", f"case {number} ({about}):\n{traceback.format_exc()}"
        shutil.rmtree(folder.parent, ignore_errors=True)
        pipe.send((answer, failure))


def fuzz(cases: Iterable[int], seed: int, workspace: Path, num_workers: int) -> tuple[Counter[str], list[str]]:
    """Runs cases; how many ended how, and what is to be said of those that failed."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # libraries read it as soon as a worker imports them
    context = multiprocessing.get_context("spawn")
    left = iter(cases)
    counts: Counter[str] = Counter()
    failures: list[str] = []
    busy: dict[Connection, tuple[Any, int, Patience]] = {}

    def start() -> tuple[Connection, Any]:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, seed, workspace), daemon=True)
        process.start()
        there.close()
        return here, process

    def give(pipe: Connection, process: Any) -> None:
        number = next(left, None)
        if number is None:
            process.kill()
            return
        pipe.send(number)
        busy[pipe] = process, number, Patience(lambda: [process.pid], LIMIT_SECONDS)

    for _ in range(num_workers):
        give(*start())
    while busy:
        ready = wait([*busy], timeout=1.0)
        for pipe in [*busy]:
            process, number, patience = busy[pipe]
            if pipe not in ready and not patience.is_over:
                continue
            del busy[pipe]
            try:
                answer, failure = pipe.recv() if pipe in ready else ("failed", f"case {number} hangs")
            except EOFError:
                answer, failure = "failed", f"case {number} ended its process"
            counts[answer] += 1
            if failure is not None:
                failures.append(failure)
            if failure is None:
                give(pipe, process)
            else:
                process.kill()
                give(*start())
            if counts.total() % 100 == 0:
                print(f"{counts.total()} cases: {dict(counts)}", flush=True)
    return counts, failures


def main() -> None:
    from tests.distributed.conftest import make_workspace

    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    arguments = parser.parse_args()
    workspace = Path(tempfile.mkdtemp(prefix="fuzz_workspace_"))
    make_workspace(workspace)
    cases = range(arguments.cases) if arguments.case is None else [arguments.case]
    counts, failures = fuzz(cases, arguments.seed, workspace, num_workers=os.cpu_count() or 1)
    print("\n".join(failures))
    print(f"{counts.total()} cases with seed {arguments.seed}: {dict(counts)}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
