"""Pipeline parallelism: which layers a stage holds, and torch's schedules over microbatches of different token
counts."""
