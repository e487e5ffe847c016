"""Pipeline parallelism: layers per stage, and torch's schedules over microbatches of different token counts."""
