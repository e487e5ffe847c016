"""Pipeline parallelism: which layers a stage holds, and torch's schedules over rows of different token counts."""
