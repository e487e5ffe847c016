"""Published versions over HTTP and on other file systems, and signatures: what is not the run's is refused."""

import functools
import http.server
import json
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from automodel_rl.errors import InputError
from automodel_rl.hf.buckets import Bucket, Chunk, Plan, TensorSpec
from automodel_rl.launch.listener import MAX_PENDING_HANDSHAKES_PER_ADDRESS
from automodel_rl.weight_sync import published, version_files, version_server
from automodel_rl.weight_sync.checksum import checksum
from automodel_rl.weight_sync.delta import bits_of, delta_of
from automodel_rl.weight_sync.published import HashedFile, PublishedWeights, folder_of, write_block, write_version
from automodel_rl.weight_sync.signatures import Signer
from automodel_rl.weight_sync.version_files import VERSION_FILE, VersionFiles, write_newest
from automodel_rl.weight_sync.version_server import RequestSigner, VersionServer
from tests.keys import signing_keys

SPEC = TensorSpec("weight", (1000,), torch.bfloat16)
BUCKET = Bucket(torch.bfloat16, 1000, (Chunk(0, 0, 1000, 0),))
KEY = b"k" * 32

PLAN = Plan((SPEC,), (BUCKET,))


def tensor_of(number: int) -> Tensor:
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:number] += 1
    return weight


def publish(folder: Path, numbers: range, signer: Signer | None = None) -> None:
    """Versions, each a change of the one before."""
    before, old = None, None
    for number in numbers:
        new, place = tensor_of(number), folder_of(folder, number)
        place.mkdir(parents=True)
        file = HashedFile(place / "sender_0.bin")
        changed = write_block(file, PLAN, BUCKET, new, None if old is None else delta_of(old, new))
        files, sums = {"sender_0.bin": file.finish()}, {"weight": int(checksum(new))}
        write_newest(folder, number)
        before, old = (number, write_version(place, number, before, [PLAN], sums, files, changed, signer)), new


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    publish(tmp_path / "weights", range(1, 4))
    return tmp_path / "weights"


@pytest.fixture(name="server")
def make_server(folder: Path) -> Iterator[VersionServer]:
    server = VersionServer(folder, "127.0.0.1", 0, KEY)
    yield server
    server.close()


@pytest.fixture(name="impatient", autouse=True)
def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_files, "TRIES", 2)


def files_of(server: VersionServer, key: bytes = KEY) -> VersionFiles:
    return VersionFiles(f"http://127.0.0.1:{server.port}", RequestSigner(key, server.salt).headers)


def headers_of(server: VersionServer, path: str) -> dict[str, str]:
    return RequestSigner(KEY, server.salt).headers(f"http://train{path}")


def test_the_runs_own_server_gives_every_version(folder: Path, server: VersionServer) -> None:
    weights, tensors = PublishedWeights(files_of(server)), dict[str, Tensor]()
    for number in (1, 3):
        assert weights.load_version(tensors, number) == number
        assert torch.equal(tensors["weight"], tensor_of(number))
    publish(folder, range(4, 5))  # while it is running; a whole one
    assert weights.load_version(tensors) == 4
    assert torch.equal(tensors["weight"], tensor_of(4))


def test_nothing_is_given_without_the_key(server: VersionServer) -> None:
    with pytest.raises(InputError, match="401"):
        PublishedWeights(files_of(server, b"another")).load_version({})
    with pytest.raises(InputError, match="401"):
        PublishedWeights(f"http://127.0.0.1:{server.port}").load_version({}, 1)


def test_a_request_is_answered_once_and_for_its_path_alone(server: VersionServer) -> None:
    """Whoever is taken for the run's server gets requests, and can do nothing with them later."""
    path, at = "/00000001/version.json", f"http://127.0.0.1:{server.port}"
    headers = headers_of(server, path)
    assert "hash" in urllib.request.urlopen(urllib.request.Request(at + path, headers=headers)).read().decode()
    for again in (path, "/00000002/version.json"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(at + again, headers=headers))


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/join.json",
        "/../secret",
        "/00000001/../join.json",
        "/.00000004.unfinished/sender_0.bin",
        "/00000001/",
        "//join.json",
    ],
)
def test_nothing_else_in_the_folder_is_given(folder: Path, server: VersionServer, path: str) -> None:
    for secret in (folder / "join.json", folder.parent / "secret"):
        secret.write_text("secret")
    shutil.copytree(folder_of(folder, 3), folder / ".00000004.unfinished")
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers_of(server, path))
    with pytest.raises(urllib.error.HTTPError, match="40[14]"):
        urllib.request.urlopen(request)


def test_what_is_damaged_on_the_way_is_refused_and_read_again(
    folder: Path, server: VersionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, tensors = PublishedWeights(files_of(server)), dict[str, Tensor]()
    content = bytearray((folder_of(folder, 2) / "sender_0.bin").read_bytes())
    good = bytes(content)
    content[-1] ^= 1
    (folder_of(folder, 2) / "sender_0.bin").write_bytes(content)
    with pytest.raises(InputError, match=r"00000002/sender_0\.bin: is damaged"):
        weights.load_version(tensors)
    (folder_of(folder, 2) / "sender_0.bin").unlink()
    with pytest.raises(InputError, match=r"00000002/sender_0\.bin: cannot be read"):
        weights.load_version(tensors)
    (folder_of(folder, 2) / "sender_0.bin").write_bytes(good)
    assert weights.load_version(tensors) == 3
    assert torch.equal(tensors["weight"], tensor_of(3))


def test_readers_that_are_gone_and_silent_strangers_harm_nobody(
    folder: Path, server: VersionServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder_of(folder, 3) / "sender_1.bin").open("wb") as large:
        large.truncate(2**26)
    path = "/00000003/sender_1.bin"
    for _ in range(3):
        signature = headers_of(server, path)["Authorization"]
        request = f"GET {path} HTTP/1.0\r\nAuthorization: {signature}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as reader:
            reader.sendall(request.encode())
            reader.recv(10)
    monkeypatch.setattr(version_server, "HANDSHAKE_SECONDS", 1.0)
    silent = [
        socket.create_connection(("127.0.0.1", server.port)) for _ in range(2 * MAX_PENDING_HANDSHAKES_PER_ADDRESS)
    ]
    for one in silent:
        one.sendall(b"GET /")
    assert PublishedWeights(files_of(server)).load_version({}) == 3
    for one in silent:
        one.settimeout(30.0)
        assert one.recv(1) == b"", "it is hung up on"
        one.close()
    assert capfd.readouterr().err == ""


def test_a_server_that_is_gone_is_one_line(server: VersionServer) -> None:
    files = files_of(server)
    server.close()
    with pytest.raises(InputError, match=r"^http://127\.0\.0\.1:\d+: cannot be read .*$"):
        PublishedWeights(files).load_version({})


def test_pythons_own_web_server_gives_them_too(folder: Path) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder.parent))
    handler.func.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tensors: dict[str, Tensor] = {}
        assert PublishedWeights(f"http://127.0.0.1:{server.server_port}/weights").load_version(tensors) == 3
        server.shutdown()
    assert torch.equal(tensors["weight"], tensor_of(3))


def test_so_do_other_file_systems(folder: Path) -> None:
    store, weights, tensors = fsspec.filesystem("memory"), PublishedWeights("memory://bucket"), dict[str, Tensor]()
    with pytest.raises(InputError, match="contains no published version yet"):
        weights.load_version(tensors)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        store.pipe_file(f"/bucket/{path.relative_to(folder)}", path.read_bytes())
    assert weights.load_version(tensors) == 3
    assert torch.equal(tensors["weight"], tensor_of(3))
    store.rm("/bucket/00000003/version.json")  # as if it were not uploaded yet
    with pytest.raises(InputError, match="is not a published version"):
        weights.load_version(tensors)
    store.pipe_file("/bucket/newest.json", b"<html>")
    with pytest.raises(InputError, match=r"newest\.json: contains no version"):
        weights.load_version(tensors)
    with pytest.raises(InputError, match="Protocol not known"):
        VersionFiles("nowhere://bucket")


@pytest.fixture(name="keys")
def make_keys(tmp_path: Path) -> tuple[Path, Path]:
    return signing_keys(tmp_path)


def forged(values: dict[str, Any]) -> None:
    values["signature"] = "00" * 64


def of_version_2(values: dict[str, Any]) -> None:
    """The signature of another version of the same run."""
    values["signature"] = values["others"]


def unsigned(values: dict[str, Any]) -> None:
    values["signature"] = None


def of_another_kind(values: dict[str, Any]) -> None:
    values["signature"] = 5


@pytest.mark.parametrize("change", [forged, of_version_2, unsigned, of_another_kind])
def test_only_what_the_run_has_signed_is_taken(
    tmp_path: Path, keys: tuple[Path, Path], change: Callable[[dict[str, Any]], None]
) -> None:
    folder = tmp_path / "signed"
    publish(folder, range(1, 4), Signer(keys[0]))
    tensors: dict[str, Tensor] = {}
    assert PublishedWeights(folder, keys[1]).load_version(tensors) == 3
    file = folder_of(folder, 3) / VERSION_FILE
    values = json.loads(file.read_text())
    values["others"] = json.loads((folder_of(folder, 2) / VERSION_FILE).read_text())["signature"]
    change(values)
    del values["others"]
    file.write_text(json.dumps(values))
    assert PublishedWeights(folder).load_version(tensors) == 3  # who verifies nothing reads it
    with pytest.raises(InputError, match="is not signed with the run's key"):
        PublishedWeights(folder, keys[1]).load_version(tensors)


def test_weights_of_another_under_a_signed_version_are_refused(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """Each version is consistent in itself, and the newest has the run's signature."""
    publish(tmp_path / "signed", range(1, 3), Signer(keys[0]))
    publish(tmp_path / "others", range(1, 2))
    other = folder_of(tmp_path / "others", 1)
    changed = tensor_of(7)
    file = HashedFile(other / "sender_0.bin")
    write_block(file, PLAN, BUCKET, changed)
    (other / VERSION_FILE).unlink()
    sums, files = {"weight": int(checksum(changed))}, {"sender_0.bin": file.finish()}
    write_version(other, 1, None, [PLAN], sums, files, 1000, None)
    shutil.rmtree(folder_of(tmp_path / "signed", 1))
    shutil.copytree(other, folder_of(tmp_path / "signed", 1))
    with pytest.raises(InputError, match="is not the version that 2 is based on"):
        PublishedWeights(tmp_path / "signed", keys[1]).load_version({})


def test_tensors_that_were_changed_in_between_are_read_anew(tmp_path: Path) -> None:
    publish(tmp_path / "weights", range(1, 3))
    weights, tensors = PublishedWeights(tmp_path / "weights"), dict[str, Tensor]()
    weights.load_version(tensors, 1)
    tensors["weight"][999] += 1  # which version 2 does not change
    weights.load_version(tensors, 2)
    assert torch.equal(tensors["weight"], tensor_of(2))
    weights.load_version(other := {"weight": tensor_of(1)}, 1)
    other["weight"] = tensor_of(9)
    weights.load_version(other, 2)
    assert torch.equal(other["weight"], tensor_of(2))


def test_a_delta_of_other_numbers_is_noticed(tmp_path: Path) -> None:
    publish(tmp_path / "weights", range(1, 3))
    weights, tensors = PublishedWeights(tmp_path / "weights"), dict[str, Tensor]()
    weights.load_version(tensors, 1)
    bits_of(tensors["weight"])[1] = 0  # which torch does not know of
    with pytest.raises(InputError, match="1 tensors have wrong checksums"):
        weights.load_version(tensors, 2)
    weights.load_version(tensors, 2)
    assert torch.equal(tensors["weight"], tensor_of(2))


def test_what_is_no_signing_key_is_one_line(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Signer(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is not an unencrypted PEM key"):
        Signer(keys[1])
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "other.pem").write_bytes(other)
    with pytest.raises(InputError, match="versions are signed with Ed25519PrivateKey"):
        Signer(tmp_path / "other.pem")
    with pytest.raises(InputError, match="is not an unencrypted PEM key"):
        PublishedWeights(tmp_path, keys[0])


def test_other_tensors_than_those_of_the_last_call_begin_anew(folder: Path) -> None:
    weights = PublishedWeights(folder)
    weights.load_version({}, 2)
    tensors: dict[str, Tensor] = {}
    assert weights.load_version(tensors) == 3
    assert torch.equal(tensors["weight"], tensor_of(3))


def test_who_can_write_to_the_folder_cannot_change_signed_files_while_they_are_read(
    tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "signed", range(1, 2), Signer(keys[0]))
    file = folder_of(tmp_path / "signed", 1) / "sender_0.bin"

    def overwritten(read: BufferedReader) -> tuple[int, str]:
        found = size_and_hash(read)
        file.write_bytes(bytes(file.stat().st_size))
        return found

    size_and_hash = published._size_and_hash
    monkeypatch.setattr(published, "_size_and_hash", overwritten)
    tensors: dict[str, Tensor] = {}
    PublishedWeights(tmp_path / "signed", keys[1]).load_version(tensors)
    assert torch.equal(tensors["weight"], tensor_of(1))
