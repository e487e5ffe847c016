"""Puts known bugs into the package, one at a time, to see that `verify` or a test notices each.

python -m tests.faults [--only PART_OF_A_NAME]
"""

import argparse
import sys
import time

from tests.faults import planted
from tests.faults.notice import noticed_by_test, noticed_by_verify
from tests.faults.table import FAULTS
from tests.rank_pool import RankPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a fault's name")
    only = parser.parse_args().only
    pool, started, missed = RankPool(), time.monotonic(), []
    chosen = [name for name in FAULTS if only in name]
    try:
        for number, name in enumerate(chosen, start=1):
            with planted(name):  # what it changes must be there: else it would be taken for noticed
                pass
            by = FAULTS[name].caught_by
            try:
                noticed = noticed_by_test(name, by) if isinstance(by, str) else noticed_by_verify(name, by, pool)
            except RuntimeError as error:  # others are looked at nevertheless
                print(error, flush=True)
                noticed = ""
            missed += [] if noticed else [name]
            seconds = time.monotonic() - started
            print(f"{number}/{len(chosen)} {seconds:.0f} s {name}: {noticed or 'NOT NOTICED'}", flush=True)
    finally:
        pool.stop()
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults noticed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
