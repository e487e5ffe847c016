"""The address at which the ranks of a service find their server."""

import os

from automodel_rl.launch.door import DoorAddress

ADDRESS_VARIABLE, KEY_VARIABLE = "AUTOMODEL_RL_SERVE_ADDRESS", "AUTOMODEL_RL_SERVE_KEY"
"""Environment variables with HOST:PORT of the server's end, and with the key of its connection, in hex."""


def is_serving_rank() -> bool:
    """Whether this process is a rank that a server has started."""
    return ADDRESS_VARIABLE in os.environ


def write_address(address: DoorAddress) -> None:
    """Lets processes that this one starts find the server."""
    os.environ[ADDRESS_VARIABLE] = f"{address.host}:{address.port}"
    os.environ[KEY_VARIABLE] = address.key.hex()


def read_address() -> DoorAddress:
    """The server of this rank."""
    host, _, port = os.environ[ADDRESS_VARIABLE].rpartition(":")
    return DoorAddress(host, int(port), bytes.fromhex(os.environ[KEY_VARIABLE]))
