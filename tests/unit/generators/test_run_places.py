"""Where a run is: by its folder, or by its address and key; keys that others could read are not taken."""

import json
from pathlib import Path
from unittest import mock

import pytest

from automodel_rl.errors import InputError
from automodel_rl.generators.run_locations import (
    RemoteRun,
    SharedFolder,
    WeightsServerInfo,
    parse_location,
    read_key,
    run_key,
)


@pytest.fixture(name="key")
def make_key(tmp_path: Path) -> Path:
    run_key(tmp_path / "deep" / "key")
    return tmp_path / "deep" / "key"


def test_a_key_is_made_once_for_its_owner_alone(key: Path) -> None:
    assert key.stat().st_mode & 0o77 == 0
    assert run_key(key) == read_key(key, "--key")
    assert run_key(None) != run_key(None)


def test_a_key_as_openssl_writes_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text("0aF" * 21 + "0\n")
    assert len(read_key(tmp_path / "key", "--key")) == 32


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("00" * 32, 0o644, "other users can read or write it"),
        ("00" * 16, 0o600, "16 bytes instead of 32"),
        ("-----BEGIN PRIVATE KEY-----", 0o600, "non-hexadecimal"),
        ("", 0o600, "0 bytes"),
        (json.dumps({"key": "00" * 32}), 0o600, "non-hexadecimal"),
    ],
)
def test_what_is_no_key_is_answered_with_how_to_make_one(tmp_path: Path, content: str, mode: int, message: str) -> None:
    (tmp_path / "key").write_text(content)
    (tmp_path / "key").chmod(mode)
    with pytest.raises(InputError, match=f"^--key: is not a key .*{message}.*: create one with openssl rand -hex 32$"):
        read_key(tmp_path / "key", "--key")


@pytest.mark.parametrize("given", ["train.example.com:8900", "10.0.0.7:8900", "[fd00::7]:8900", "fd00::7:8900"])
def test_an_address_needs_a_key(given: str, key: Path) -> None:
    place = parse_location(given, key, None)
    assert isinstance(place, RemoteRun)
    assert (place.port, place.key) == (8900, read_key(key, ""))
    assert "[" not in place.host
    with pytest.raises(InputError, match="requires --key"):
        parse_location(given, None, None)


@pytest.mark.parametrize(
    "given", ["runs/math/weights", "/shared/weights:3", "weights", "a/b:80", "host:0", "host:99999"]
)
def test_everything_else_is_a_folder(given: str, key: Path) -> None:
    assert parse_location(given, None, None) == SharedFolder(Path(given))
    with pytest.raises(InputError, match="is a folder, which contains it: omit the option"):
        parse_location(given, key, None)


def test_a_folder_that_is_there_is_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:7").mkdir()
    assert parse_location("run:7", None, None) == SharedFolder(Path("run:7"))


def test_a_run_that_gives_no_weights_over_http_says_how() -> None:
    with pytest.raises(InputError, match=r"set rollout\.generator\.weights_port"):
        RemoteRun("there", 80, b"").files(None)


def test_ipv6_addresses_have_brackets_in_urls() -> None:
    assert RemoteRun("::1", 80, b"").files(WeightsServerInfo(81, "")).location == "http://[::1]:81"
    assert str(RemoteRun("::1", 80, b"")) == "[::1]:80"


def test_weights_may_be_read_through_a_tunnel(key: Path) -> None:
    place = parse_location("localhost:9900", key, "localhost:9901")
    assert place.files(WeightsServerInfo(8901, "")).location == "http://localhost:9901"
    with pytest.raises(InputError, match="must be HOST:PORT"):
        parse_location("localhost:9900", key, "9901")
    with pytest.raises(InputError, match="--weights localhost:9901: --join runs/weights is a folder"):
        parse_location("runs/weights", None, "localhost:9901")


def test_a_url_is_told_how_to_be_written(key: Path) -> None:
    with pytest.raises(InputError, match="is a URL: pass HOST:PORT, or a folder"):
        parse_location("http://train:8900", key, None)


def test_a_key_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.link", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(InputError, match="not writable"):
            run_key(tmp_path / "key")
    assert [*tmp_path.iterdir()] == []
    run_key(tmp_path / "key")
    assert [*tmp_path.iterdir()] == [tmp_path / "key"]
