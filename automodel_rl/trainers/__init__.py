"""Trainers of whole runs: SFT, DPO and GRPO."""
