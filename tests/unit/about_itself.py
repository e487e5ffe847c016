"""Says what a process can know of itself; `python -m tests.unit.about_itself CODE`, which it ends with."""

import atexit
import json
import os
import signal
import sys

from tests.warm import ONE_THREAD, REQUESTS


def main() -> None:
    descriptors = {int(name) for name in os.listdir("/proc/self/fd")} - {int(os.environ.get(REQUESTS, -1))}
    said = {
        "arguments": sys.argv,
        "name": __name__,
        "environment": {name: value for name, value in os.environ.items() if name not in {REQUESTS, *ONE_THREAD}},
        "folder": os.getcwd(),
        "descriptors": len(descriptors),
        "leads its session": os.getsid(0) == os.getpid(),
        "signals": {number: str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
    }
    print(json.dumps(said), flush=True)
    print("to the other stream", file=sys.stderr)
    atexit.register(print, "at the end")
    sys.exit(int(sys.argv[1]))


if __name__ == "__main__":
    main()
