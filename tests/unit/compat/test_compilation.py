"""What a process has compiled: counted from its first question on, also after the compiler was reset."""

import torch

from automodel_rl.compat.compilation import compiled_so_far


def test_graphs_are_counted_after_the_compiler_was_reset_too() -> None:
    before = compiled_so_far()
    for _ in range(2):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        torch.compiler.reset()  # it forgets all who are told of compilations
        compiled_so_far()
    since = compiled_so_far() - before
    assert since.graphs == 2
    assert since.seconds > 0
