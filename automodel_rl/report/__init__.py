"""Report pages on one or several runs, live and afterwards."""
