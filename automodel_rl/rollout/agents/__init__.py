"""Agents: programs that talk to an endpoint beside the run. Their turns are trained as they were sampled."""
