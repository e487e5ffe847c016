"""Completions of held-out prompts that a run keeps to be looked at."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A prompt, the completion that the model wrote, and the one that the data has."""

    prompt: str
    completion: str
    expected: str
