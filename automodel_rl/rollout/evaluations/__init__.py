"""Evaluations of a run's model by lm-eval and inspect-ai, on the run's own generators."""
