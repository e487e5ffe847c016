"""Checks of vLLM servers before a run uses them."""

import json
from collections.abc import Sequence
from pathlib import Path

from automodel_rl.errors import InputError
from automodel_rl.generators.vllm_http import PROBE_SECONDS, TOKEN_VARIABLE, VllmServer

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs "
    """--weight-transfer-config '{"backend": "nccl"}'"""
)


FILE = "file:"
"""Prefix that marks a URL as a file that lists servers."""


def listed(urls: Sequence[str]) -> list[VllmServer]:
    """Returns the servers at URLs, or at those that files list, one per line, without duplicates. Raises InputError if
    a file cannot be read, or there is no server."""
    found: list[str] = []
    for url in urls:
        if not url.startswith(FILE):
            found.append(url)
            continue
        try:
            lines = Path(url.removeprefix(FILE)).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"rollout.generator.urls: {url} cannot be read ({error})") from None
        found += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise InputError(f"rollout.generator.urls: {', '.join(urls)} contains no server: write one URL per line")
    return [*dict.fromkeys(map(VllmServer, found))]


def connect_servers(urls: Sequence[str], routes: bool, *, some_may_be_gone: bool = False) -> list[VllmServer]:
    """Connects to `listed` servers, and checks them.

    Args:
        routes: they must report routes.
        some_may_be_gone: one usable server is enough, as later in a run.

    Raises:
        InputError: a server cannot be used; the text says how to start it.
    """
    servers, problems = listed(urls), []
    for server in servers:
        try:
            check_server(server, routes)
        except InputError as problem:
            problems.append(problem)
    if problems and not (some_may_be_gone and len(problems) < len(servers)):
        raise problems[0]
    return servers


def check_server(server: VllmServer, routes: bool) -> None:
    """Raises InputError if a server cannot be used."""
    what = f"rollout.generator.urls: {server.url}"
    if server.is_exposed:
        raise InputError(
            f"{what} is not on this machine, so any client could use it: start it with --api-key and set "
            f"{TOKEN_VARIABLE} to that key"
        )
    try:
        info = json.dumps(server.get("/server_info?config_format=json", PROBE_SECONDS))
    except (OSError, ValueError) as error:
        raise InputError(f"{what} does not answer ({error}): start it with {SERVE}") from None
    if server.get("/is_paused")["is_paused"]:
        raise InputError(f"{what} is paused, as after a failed weight sync: restart it")
    if routes and '"enable_return_routed_experts": true' not in info:
        raise InputError(
            f"{what} does not report the experts of its tokens, which router_replay needs: start it with {SERVE} "
            "--enable-return-routed-experts"
        )
    if "processed_logprobs" not in info:
        raise InputError(
            f"{what} reports raw log-probabilities, which are wrong unless temperature is 1: start it with {SERVE}"
        )
