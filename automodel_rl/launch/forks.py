"""What a fork of a process that has used torch needs."""

import sys


def renew_thread_pool() -> None:
    """Replaces torch's thread pool, if torch is imported. Call it first in a forked process.

    The parent's pool has no threads in a fork, and torch replaces it on first use. This is not thread-safe: a second
    thread that asks meanwhile gets no pool, and the process aborts with `Invalid thread pool!`, raised in a thread of
    autograd or gloo (torch 2.11, aten/src/ATen/ParallelOpenMP.cpp).
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        count = torch.get_num_threads()
        torch.set_num_threads(1)  # a new pool of `count` would start its threads, which most forks do not need
        torch.set_num_threads(count)
