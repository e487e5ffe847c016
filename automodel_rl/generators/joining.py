"""The program's side of generators that join a run from anywhere, and leave it, while it goes on.

A run writes its address to the folder of its published weights, which it shares with them:

    a generator sends      the program answers
    Joining                Welcome, or a Failure and the end of the connection
    HasStarted             UseVersion and Generate, in the order in which they count, until the end
    Finished, Failed       nothing
    Leaving                the end of the connection
"""

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import PROTOCOL, Failure, Message
from automodel_rl.generators.meeting import Door, FleetAddress
from automodel_rl.generators.model_copy import ModelCopy
from automodel_rl.generators.transformers_generator import Writing

JOIN_FILE = "join.json"
"""Name of the file with a run's address, in the folder of its published weights. Only its owner can read it: whoever
has its key can run code on both sides."""


def release() -> str:
    """What both sides must have in common: the package's release, and the messages that it knows."""
    return f"{version('automodel-rl')} {PROTOCOL[:12]}"


@dataclass(frozen=True)
class Joining(Message):
    """A generator wants to join.

    Attributes:
        name: its process, in words.
        release: what it knows.
    """

    name: str
    release: str = field(default_factory=release)


@dataclass(frozen=True)
class Welcome(Message):
    """What a generator needs to start.

    Attributes:
        copy: the model, for the transformers generator. The generator chooses the device.
        writing: how that writes completions.
        vllm: the arguments of vllm.LLM that follow from the run.
        timeout: the run's weight_sync.timeout, in seconds.
        vocab_size: number of the model's token ids.
    """

    copy: ModelCopy
    writing: Writing
    vllm: dict[str, Any]
    timeout: float
    vocab_size: int


@dataclass(frozen=True)
class HasStarted(Message):
    """The generator has started, and takes versions of weights and requests."""


@dataclass(frozen=True)
class Leaving(Message):
    """The generator writes no more; `text` is the reason. Nothing that it was to write is to blame."""

    text: str


class JoiningDoor:
    """Lets generators join, in threads, until it is closed.

    Args:
        choice: where to listen.
        folder: the folder of published weights, which gets the run's address.
        welcome: what generators need.
        admit: called with the name and the connection of each generator that has started, in a thread of its own.

    Raises:
        InputError: the port is taken, the folder cannot be written to, or another run lets generators join there.
    """

    def __init__(
        self,
        choice: JoinedGeneratorConfig,
        folder: Path,
        welcome: Welcome,
        admit: Callable[[str, Connection], None],
    ):
        self.welcome, self.admit, self.folder, self.file = welcome, admit, folder, folder / JOIN_FILE
        if _is_answered(folder):
            raise InputError(
                f"weight_sync.publish={folder}: another run lets generators join there: give each run a folder of its "
                "own"
            )
        try:
            self._door = Door(choice.host, choice.port, secrets.token_bytes(32), self._greet)
        except OSError as error:
            raise InputError(
                f"rollout.generator.port={choice.port} cannot be listened on ({error.strerror}): choose another, or 0 "
                "for any"
            ) from None
        address = self._door.address
        values = {"host": choice.host, "port": address.port, "key": address.key.hex()}
        unfinished = self.file.with_name(f".{JOIN_FILE}.unfinished")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished.unlink(missing_ok=True)
            with open(unfinished, "x", opener=_for_owner_only) as file:
                json.dump(values, file)
            unfinished.replace(self.file)
        except OSError as error:
            self._door.close()
            raise InputError(
                f"weight_sync.publish={folder}: cannot be written ({error.strerror}): choose another folder"
            ) from None

    def close(self) -> None:
        """Lets no more generators join, and shows those that are there that the run has ended."""
        self._door.close()
        with contextlib.suppress(OSError, InputError):
            if address_in(self.folder) == self._door.address:  # else of a run that has come since
                self.file.unlink()

    def _greet(self, connection: Connection) -> None:
        try:
            first = connection.recv()
            if not isinstance(first, Joining) or first.release != release():
                theirs = first.release if isinstance(first, Joining) else "another one"
                connection.send(Failure(f"the run is of automodel_rl {release()}, and this is {theirs}: use the same"))
                raise EOFError
            connection.send(self.welcome)
            if not isinstance(connection.recv(), HasStarted):
                raise EOFError
        except Exception:  # it is gone, or what it sends cannot be read
            connection.close()
            return
        self.admit(first.name, connection)


def address_in(folder: Path) -> FleetAddress | None:
    """The address of the run that publishes to a folder; None if none does at the moment."""
    try:
        with (folder / JOIN_FILE).open() as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.getuid() or about.st_mode & 0o077:
                raise ValueError("others can write or read it, so that its key may be theirs")
            values = json.load(file)
        return FleetAddress(str(values["host"]), int(values["port"]), bytes.fromhex(values["key"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / JOIN_FILE}: is no address of a run ({error}): give the folder that a run publishes to"
        ) from None


def _is_answered(folder: Path) -> bool:
    """Whether a run answers at the address that is in a folder."""
    try:
        address = address_in(folder)
        if address is None:
            return False
        address.knock().close()
    except (InputError, AuthenticationError, OSError, EOFError):
        return False
    return True


def _for_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
