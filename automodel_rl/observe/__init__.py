"""Everything that shows how a run goes: metrics, trackers, console, report, and the run directory."""
