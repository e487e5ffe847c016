"""What this package must know of model families and is not in their configs: the only room that names families."""
