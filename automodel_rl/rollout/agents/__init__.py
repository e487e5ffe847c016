"""Agents: any program that talks to an endpoint beside the run. Its turns are trained as they were sampled."""
