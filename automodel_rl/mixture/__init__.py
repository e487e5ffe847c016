"""Mixtures of experts: experts over ranks, router losses and biases, and router replay."""
