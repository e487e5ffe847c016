"""Bugs of connections from elsewhere: handshakes, messages, published versions."""

import hmac
import time
from typing import Any
from unittest import mock

from tests.faults.fault import Fault, patch

AUTHENTICATED = "unit/launch/test_authenticated.py"
JOINED = "unit/generators/test_joined_members.py"
HOSTILE = "unit/weight_sync/test_hostile_versions.py"
ELSEWHERE = "unit/weight_sync/test_versions_elsewhere.py"
ALIVE = "test_only_what_was_asked_for_and_reading_for_an_hour_show_that_it_is_alive"


def _frames_not_numbered() -> Any:
    from automodel_rl.launch import authenticated

    def without_number(key: bytes, start: bytes, content: bytes = b"") -> bytes:
        numbered = start.startswith((b"length", b"content"))
        return hmac.digest(key, (start[:6] if numbered else start) + content, "sha256")

    return mock.patch.object(authenticated, "_mac", without_number)


def _one_key_for_both_ways() -> Any:
    from automodel_rl.launch import authenticated

    own = authenticated._session_keys
    return mock.patch.object(authenticated, "_session_keys", lambda *given: (own(*given)[0],) * 2)


def _server_not_asked() -> Any:
    """The client takes any server for the run."""
    from automodel_rl.launch import authenticated

    own = authenticated.hmac.compare_digest

    class Careless:
        digest, new = hmac.digest, hmac.new

        @staticmethod
        def compare_digest(given: bytes, due: bytes) -> bool:
            own(given, due)
            return True

    return mock.patch.object(authenticated, "hmac", Careless)


def _alive_by_anything() -> Any:
    from automodel_rl.generators.fleet import Fleet

    take = Fleet._handle_message

    def taken(fleet: Fleet, member: Any, message: Any) -> None:
        take(fleet, member, message)
        member.record_completion()

    return mock.patch.object(Fleet, "_handle_message", taken)


def _patient_handshake() -> Any:
    return patch("launch.listener.prove_as_server", _proved_at_leisure)


def _proved_at_leisure(end: Any, key: bytes, deadline: float) -> Any:
    from automodel_rl.launch.authenticated import prove_as_server

    return prove_as_server(end, key, time.monotonic() + 3600)


def _requests_answered_again() -> Any:
    from automodel_rl.weight_sync.version_server import _Server

    return mock.patch.object(
        _Server, "is_signed", lambda server, path, given: server.signer.nonce_of(path, given) is not None
    )


def _unpacked_whatever_it_takes() -> Any:
    import zstandard

    return patch(
        "weight_sync.published._unpacked",
        lambda packed, num_bytes, **_: zstandard.ZstdDecompressor().decompress(packed, max_output_size=2**31),
    )


def _first_version_from_anyone() -> Any:
    from automodel_rl.generators.fleet import Fleet

    return mock.patch.object(Fleet, "_newest", return_value=None)


FAULTS: dict[str, Fault] = {
    "frames of a connection not numbered": Fault(
        _frames_not_numbered,
        f"{AUTHENTICATED}::test_frames_that_an_attacker_touches_end_the_connection[repeated]",
    ),
    "a key for both directions of a connection": Fault(
        _one_key_for_both_ways,
        f"{AUTHENTICATED}::test_frames_that_an_attacker_touches_end_the_connection[sent back]",
    ),
    "any server taken for the run": Fault(
        _server_not_asked, f"{AUTHENTICATED}::test_a_server_cannot_use_what_a_client_says_as_its_own_proof"
    ),
    "a handshake without a deadline": Fault(
        _patient_handshake, f"{AUTHENTICATED}::test_slow_clients_keep_nobody_out_and_are_hung_up_on"
    ),
    "places for strangers not counted by address": Fault(
        lambda: patch("launch.listener._network_of", lambda _: "anywhere"),
        f"{AUTHENTICATED}::test_places_are_counted_by_address",
    ),
    "an evicted handshake not tried again": Fault(
        lambda: patch("launch.listener.MAX_HANDSHAKES", 1),
        "unit/launch/test_door.py::test_a_handshake_that_is_broken_off_to_make_room_is_tried_again",
    ),
    "reading keeps a generator alive for ever": Fault(
        lambda: patch("generators.member.MAX_READING_SECONDS", float("inf")), f"{JOINED}::{ALIVE}"
    ),
    "whatever a generator sends keeps it alive": Fault(_alive_by_anything, f"{JOINED}::{ALIVE}"),
    "completions of joined generators not checked": Fault(
        lambda: patch("generators.protocol.Completion.problem", lambda *_: ""),
        f"{JOINED}::test_a_generator_that_sends_what_cannot_be_is_lost_and_others_write",
    ),
    "a generator answers for another": Fault(
        lambda: patch("generators.fleet.Fleet._check", lambda *_: None),
        f"{JOINED}::test_a_generator_cannot_answer_for_another",
    ),
    "a generator reads the first version from anyone": Fault(
        _first_version_from_anyone, f"{JOINED}::test_the_hash_of_the_first_version_comes_from_the_run"
    ),
    "a request of weights answered twice": Fault(
        _requests_answered_again, f"{ELSEWHERE}::test_a_request_is_answered_once_and_for_its_path_alone"
    ),
    "blocks unpacked to any size": Fault(
        _unpacked_whatever_it_takes, f"{HOSTILE}::test_what_unpacks_to_more_than_is_due_is_not_unpacked"
    ),
    "published tensors of any size made": Fault(
        lambda: patch("weight_sync.published._check_fits", lambda _: None),
        f"{HOSTILE}::test_tensors_that_cannot_be_are_refused",
    ),
}
