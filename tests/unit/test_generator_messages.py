"""Messages between a rank and its generator's process: who may import what, and two sides of different versions."""

import ast
import dataclasses
import sys
import typing
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl import generator_messages
from automodel_rl.generator_messages import ProtocolError, Sampling, Start, receive_start
from automodel_rl.generators.child_process import ChildProcess
from automodel_rl.generators.generator_process import GeneratorProcess

PACKAGE = Path(generator_messages.__file__).parent
ALONE = {
    "generator_messages.py": set(),
    "generators/vllm_worker.py": {"vllm", "vllm_versions", "PIL", "transformers"},
    "generators/vllm_same_device.py": {"torch", "vllm", "vllm_versions"},
    "generators/vllm_split_worker.py": {"vllm"},
    "generators/vllm_versions.py": {"torch"},
}


@pytest.mark.parametrize("file", ALONE)
def test_files_that_run_beside_vllm_import_nothing_of_this_package(file: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names == ALONE[file]


def first_message(message: Any) -> Start:
    """What a worker makes of it."""
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send(message)
        return receive_start(theirs)


def test_a_rank_of_the_same_version_may_start_a_generator() -> None:
    assert first_message(Start({"a": 1})).settings == {"a": 1}


class Vanishing:
    """Of a class that the other side does not have."""


def test_a_rank_that_knows_other_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for message in (("start", {}), Start({}, protocol="another"), SimpleNamespace()):
        with pytest.raises(ProtocolError, match="different versions of automodel_rl/generator_messages.py"):
            first_message(message)
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send(Vanishing())
        monkeypatch.delattr(f"{__name__}.Vanishing")
        with pytest.raises(ProtocolError, match="different versions of .* .*Can't get attribute 'Vanishing'"):
            receive_start(theirs)


def test_the_fingerprint_changes_with_every_field_and_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    assert generator_messages._fingerprint() == generator_messages.PROTOCOL
    other = dataclasses.make_dataclass("Finished", ["number", "index", "completion"])
    with monkeypatch.context() as patch:
        patch.setattr(generator_messages, "Finished", other)
        assert generator_messages._fingerprint() != generator_messages.PROTOCOL
    monkeypatch.setitem(generator_messages.VERBS, "bucket", (("sender", "number", "slot"), "place"))
    assert generator_messages._fingerprint() != generator_messages.PROTOCOL


RECEIVERS = (
    "weight_sync/generator_end.py",
    "generators/vllm_worker.py",
    "generators/vllm_server_weights.py",
    "generators/generator_ranks.py",
)


def test_receivers_know_all_verbs_and_no_others() -> None:
    """The texts in the patterns of their match statements."""
    known = set()
    for file in RECEIVERS:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant):
                known.add(node.value.value)
    assert known == {*generator_messages.VERBS} == {*typing.get_args(generator_messages.Verb)}


UNREADABLE = """
import sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[-1]))
connection.recv_bytes()
connection.send_bytes(b"cautomodel_rl.generator_messages\\nNewer\\n.")
connection.recv_bytes()
"""


def test_an_answer_that_this_side_cannot_read_ends_the_generator() -> None:
    with pytest.raises(RuntimeError, match="its process sent an unreadable message .AttributeError: .*'Newer'"):
        GeneratorProcess(ChildProcess([sys.executable, "-c", UNREADABLE]), None).start()


def test_vllm_is_asked_for_the_whole_distribution_and_ends_at_the_tokens_of_the_request() -> None:
    whole = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 5, "ignore_eos": True}
    assert Sampling(5).for_vllm((2, 3)) == whole | {"stop_token_ids": [2, 3]}
    assert Sampling(5, stop_token_ids=()).for_vllm((2, 3)) == whole | {"stop_token_ids": []}
    stops = {"stop": ["."], "include_stop_str_in_output": True, "stop_token_ids": [7], "skip_special_tokens": False}
    assert Sampling(5, 0.5, 0.9, 4, (".",), (7,)).for_vllm((2, 3)) == (
        whole | stops | {"temperature": 0.5, "top_p": 0.9, "top_k": 4}
    )
