"""What a fork of a process that has used torch needs."""

import sys


def renew_thread_pool() -> None:
    """Makes torch's thread pool anew, if torch is there. Comes first in a forked process.

    A fork has none of its parent's threads, so the first thread that asks torch for the pool replaces it. A second one
    that asks meanwhile finds none, and the process aborts: `Invalid thread pool!`, raised in a thread of autograd or
    gloo (torch 2.11, aten/src/ATen/ParallelOpenMP.cpp).
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())
