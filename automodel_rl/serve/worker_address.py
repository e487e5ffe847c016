"""The server's address for the ranks of a service."""

import os

from automodel_rl.launch.listener import ListenerAddress

ADDRESS_VARIABLE, KEY_VARIABLE = "AUTOMODEL_RL_SERVE_ADDRESS", "AUTOMODEL_RL_SERVE_KEY"
"""Environment variables with HOST:PORT of the server's listener for ranks, and with its key in hex."""


def is_serving_rank() -> bool:
    return ADDRESS_VARIABLE in os.environ


def write_address(address: ListenerAddress) -> None:
    os.environ[ADDRESS_VARIABLE] = f"{address.host}:{address.port}"
    os.environ[KEY_VARIABLE] = address.key.hex()


def read_address() -> ListenerAddress:
    host, _, port = os.environ[ADDRESS_VARIABLE].rpartition(":")
    return ListenerAddress(host, int(port), bytes.fromhex(os.environ[KEY_VARIABLE]))
