"""Facts about model families that are not in their configs. The only room that names families."""
