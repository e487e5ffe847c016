"""Everything that shows how a run goes: metrics, trackers, console, report, rollouts, and its directory."""
