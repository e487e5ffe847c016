"""What a run leaves to be looked at: metrics, console, report, directory."""
