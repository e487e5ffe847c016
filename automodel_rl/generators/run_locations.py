"""Location of a run that a generator joins: a folder that they share, or the run's address and key."""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from automodel_rl.errors import InputError
from automodel_rl.files import write_private
from automodel_rl.launch.listener import ListenerAddress
from automodel_rl.weight_sync.version_files import VersionFiles
from automodel_rl.weight_sync.version_server import RequestSigner

JOIN_FILE = "join.json"
"""Name of the file with a run's join address, in the folder of its published weights. Readable by its owner only: with
the key, others could pose as the run and execute code on generators."""

KEY_BYTES = 32


@dataclass(frozen=True)
class WeightsServerInfo:
    """HTTP server of a run's published weights: port on the run's machine, and salt of its `RequestSigner`."""

    port: int
    salt: str


class RunLocation(Protocol):
    def address(self) -> ListenerAddress | None:
        """Returns the run's join address; None if there is none at the moment."""
        ...

    def files(self, server: WeightsServerInfo | None) -> VersionFiles:
        """Returns the published weights. `server` is their HTTP server, if any."""
        ...


@dataclass(frozen=True)
class SharedFolder:
    """The folder to which the run publishes its weights, with its join address."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def address(self) -> ListenerAddress | None:
        return address_in(self.folder)

    def files(self, server: WeightsServerInfo | None) -> VersionFiles:
        return VersionFiles(self.folder)


@dataclass(frozen=True)
class RemoteRun:
    """A run that shares only a key with the generator. `weights` is HOST:PORT of its weights if not the run's
    default."""

    host: str
    port: int
    key: bytes
    weights: str | None = None

    def __str__(self) -> str:
        return f"{_in_url(self.host)}:{self.port}"

    def address(self) -> ListenerAddress:
        return ListenerAddress(self.host, self.port, self.key)

    def files(self, server: WeightsServerInfo | None) -> VersionFiles:
        if server is None:
            raise InputError(
                f"--join {self}: the run does not serve its weights over HTTP: set rollout.generator.weights_port, or "
                "join by the folder that it publishes to"
            )
        address = self.weights or f"{_in_url(self.host)}:{server.port}"
        return VersionFiles(f"http://{address}", RequestSigner(self.key, server.salt).headers)


def parse_location(given: str, key: Path | None, weights: str | None) -> RunLocation:
    """Returns the location of a run from command line options.

    Args:
        given: a folder, or HOST:PORT.
        key: file of the run's key, required with an address.
        weights: HOST:PORT of the weights, with an address; None for what the run reports.

    Raises:
        InputError: options do not fit together, or the key cannot be read.
    """
    if "://" in given:
        raise InputError(f"--join {given}: is a URL: pass HOST:PORT, or a folder")
    address = None if Path(given).is_dir() else _host_and_port(given)
    if address is None:
        for option, value in (("--key", key), ("--weights", weights)):
            if value is not None:
                raise InputError(f"{option} {value}: --join {given} is a folder, which contains it: omit the option")
        return SharedFolder(Path(given))
    if key is None:
        raise InputError(f"--join {given}: requires --key: pass a copy of the run's rollout.generator.key file")
    through = None if weights is None else _host_and_port(weights)
    if weights is not None and through is None:
        raise InputError(f"--weights {weights}: must be HOST:PORT")
    at = None if through is None else f"{_in_url(through[0])}:{through[1]}"
    return RemoteRun(*address, read_key(key, f"--key {key}"), at)


def _host_and_port(given: str) -> tuple[str, int] | None:
    host, _, port = given.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        return None
    return host.strip("[]"), int(port)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def read_key(file: Path, named: str) -> bytes:
    """Reads a key in hexadecimal digits. `named` is the setting, for errors.

    Raises:
        InputError: the file cannot be read, others can access it, or it holds no key.
    """
    try:
        with file.open() as opened:
            _check_owner(opened.fileno())
            key = bytes.fromhex(opened.read())
        if len(key) != KEY_BYTES:
            raise ValueError(f"{len(key)} bytes instead of {KEY_BYTES}")
    except (OSError, ValueError) as error:
        raise InputError(f"{named}: is not a key ({error}): create one with openssl rand -hex {KEY_BYTES}") from None
    return key


def run_key(file: Path | None) -> bytes:
    """Returns the key of a run: that of `file`, which is created if missing, or without one a new key.

    Raises:
        InputError: the file holds no key, or cannot be created.
    """
    key = secrets.token_bytes(KEY_BYTES)
    if file is None:
        return key
    named = f"rollout.generator.key={file}"
    if not file.exists():
        try:
            write_private(file, f"{key.hex()}\n", replaces=False)
        except FileExistsError:
            pass  # another run has created it meanwhile
        except OSError as error:
            raise InputError(f"{named}: not writable ({error.strerror}): choose another file") from None
    return read_key(file, named)


def address_in(folder: Path) -> ListenerAddress | None:
    """Returns the join address of the run that publishes to a folder; None if there is none at the moment."""
    try:
        with (folder / JOIN_FILE).open() as file:
            _check_owner(file.fileno())
            values = json.load(file)
        return ListenerAddress(str(values["host"]), int(values["port"]), bytes.fromhex(values["key"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / JOIN_FILE}: is not a run's address ({error}): pass the folder that a run publishes to"
        ) from None


def _check_owner(descriptor: int) -> None:
    about = os.fstat(descriptor)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ValueError("other users can read or write it, so the key may be theirs")
