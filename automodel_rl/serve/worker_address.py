"""The address at which the ranks of a service find their server."""

import os

ADDRESS_VARIABLE, KEY_VARIABLE = "AUTOMODEL_RL_SERVE_ADDRESS", "AUTOMODEL_RL_SERVE_KEY"
"""Environment variables with the server's socket and with the key of its connection, in hex."""


def is_serving_rank() -> bool:
    """Whether this process is a rank that a server has started."""
    return ADDRESS_VARIABLE in os.environ
