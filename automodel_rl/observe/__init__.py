"""What a run leaves to be looked at: metrics, trackers, console, report, rollouts, its directory."""
