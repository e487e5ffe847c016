"""Source files of a published wheel, read from its index without the rest: wheels of vLLM have half a gigabyte."""

import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from functools import cache

AHEAD = 2**16
"""Bytes that are read at once."""


class RemoteFile(io.RawIOBase):
    """A file behind an address, read in parts.

    Args:
        url: the address, whose server answers requests of ranges.
    """

    def __init__(self, url: str):
        self.url, self._place, self._known, self._start = url, 0, b"", 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            self.size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size}[whence]
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self.size - self._place)
        if wanted <= 0:
            return 0
        start = self._place - self._start
        if not 0 <= start <= len(self._known) - wanted:
            self._start, start = self._place, 0
            last = min(self._place + max(wanted, AHEAD), self.size) - 1
            request = urllib.request.Request(self.url, headers={"Range": f"bytes={self._place}-{last}"})
            with urllib.request.urlopen(request) as answer:
                self._known = answer.read()
        buffer[:wanted] = self._known[start : start + wanted]
        self._place += wanted
        return wanted


@cache
def open_wheel(requirement: str) -> zipfile.ZipFile:
    """The wheel that pip would install for a requirement such as `vllm==0.33.0`, on any machine."""
    where = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")
    answer = subprocess.run(
        [sys.executable, "-m", "pip", "install", *where, requirement], capture_output=True, text=True, check=True
    )
    url = json.loads(answer.stdout)["install"][0]["download_info"]["url"]
    return zipfile.ZipFile(io.BufferedReader(RemoteFile(url), AHEAD))
