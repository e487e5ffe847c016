"""Repairs torch in a forked process."""

import sys


def renew_thread_pool() -> None:
    """Replaces torch's thread pool, if torch is imported. Call it first in a forked process.

    The parent's pool has no threads in a fork. torch replaces it on first use, which is not thread-safe: a second
    thread that needs the pool meanwhile finds none, and the process aborts with `Invalid thread pool!` in an
    autograd or gloo thread (torch 2.11, aten/src/ATen/ParallelOpenMP.cpp).
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        count = torch.get_num_threads()
        torch.set_num_threads(1)  # a new pool of `count` would start its threads, which most forks do not need
        torch.set_num_threads(count)
