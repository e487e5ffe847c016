"""Known bugs that are put into the package, one at a time, to see that `verify` or a test notices each."""
