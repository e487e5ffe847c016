"""Which torch this is, for the few places where 2.11 to 2.13 differ."""

from importlib.metadata import version

TORCH = tuple(map(int, version("torch").split(".")[:2]))
"""(major, minor)"""
