"""Mixtures of experts: experts over ranks, what routers learn besides the loss, and router replay."""
