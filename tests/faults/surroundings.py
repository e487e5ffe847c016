"""Bugs around training: of configs, launching, runs' files, reports, services, plans and weight syncs."""

from tests.faults.fault import Fault

FAULTS: dict[str, Fault] = {}
