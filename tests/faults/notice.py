"""Whether a planted bug is noticed, by `verify` or by a test."""

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.faults import PLANTED, planted
from tests.faults.fault import Verified
from tests.processes import run_command

UNFIT = re.compile(
    r"TypeError: .*(?:positional argument|keyword argument|multiple values)"
    r"|tests/faults/\w+\.py\", line \d+, in .*\n(?:.*\n){1,2}.*\b(?:AttributeError|TypeError|NameError): .*"
)
"""What Python says where the code of a bug does not fit what it replaces, or what it calls."""

IMPORTED_BEFORE = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
"""Pytest's warning of plugins that are imported before it, as in a fork of a process with libraries."""


def noticed_by_test(name: str, test: str) -> str:
    """The test, if it fails with the fault; empty if it passes."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not longer", *IMPORTED_BEFORE, f"tests/{test}"]
    done = run_command(command, env={**os.environ, PLANTED: name})
    check_planted(done.stdout)
    # A crash is noticed, too. A test that could not begin has found nothing, whatever the exit code says.
    if (done.returncode == 1 and "\nFAILED " in done.stdout) or done.returncode < 0:
        return test
    if done.returncode:
        raise RuntimeError(f"{test} does not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ""


def check_planted(told: str) -> None:
    """Raises RuntimeError for a failure that is not the bug's but that of planting it, and so shows nothing."""
    wrong = UNFIT.search(told)
    if wrong is not None:
        raise RuntimeError(f"the bug does not fit what it replaces: {wrong[0].splitlines()[-1]}")


def noticed_by_verify(name: str, layout: Verified, pool: Any) -> str:
    """What `verify` says is different with the fault; empty if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(layout, Path(folder))
        ranks = pool(num_ranks(layout))
        sound = ranks.run(different_kinds, layout, None, Path(folder))[0]
        if sound:
            raise RuntimeError(f"{layout} is different without a fault, in {sound}")
        try:
            kinds = ranks.run(different_kinds, layout, name, Path(folder))[0]
        except AssertionError as failure:  # a rank raised: that is noticed, too
            check_planted(str(failure))
            return f"verify, which fails: {str(failure).splitlines()[0][:100]}"
    return f"verify, in {kinds[0]}" + (f" and {len(kinds) - 1} more" if kinds[1:] else "") if kinds else ""


def different_kinds(caught_by: Verified, fault: str | None, folder: Path) -> list[str]:
    """What `verify` says is different, with a fault or without one; on a rank."""
    from automodel_rl.config import ParallelConfig
    from automodel_rl.config.components import ComponentsConfig
    from automodel_rl.families.known import is_exact
    from automodel_rl.hf.read import read_config
    from automodel_rl.tools.verify.command import FLOAT32, FLOAT64, judge
    from automodel_rl.tools.verify.comparison import Case, compare

    parallel = ParallelConfig(**caught_by.sizes)
    in_fp32 = not is_exact(read_config(folder), parallel.tp)
    components = None if caught_by.components is None else ComponentsConfig.model_validate(caught_by.components)
    case = Case(parallel, components=components, **caught_by.case)
    with planted(fault):
        found = compare(case, folder, folder)
    return [row.kind for row in judge(found, FLOAT32 if in_fp32 else FLOAT64) if not row.is_equal]


def save_model(caught_by: Verified, folder: Path) -> None:
    from tests.tiny import save_tiny_model, save_tiny_multimodal_model

    if caught_by.components is not None:
        save_tiny_multimodal_model(folder, caught_by.family)
    else:
        save_tiny_model(folder, caught_by.family, tied=caught_by.tied)


def num_ranks(caught_by: Verified) -> int:
    from automodel_rl.config import ParallelConfig

    return 3 if caught_by.components is not None else ParallelConfig(**caught_by.sizes).world_size
