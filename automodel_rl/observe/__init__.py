"""Everything that shows how a run goes: metrics, trackers, console, and the run directory."""
