"""The policy as a program sees it: rows in, results in their order. One program leads; all ranks answer its calls."""
