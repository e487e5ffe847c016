"""Rewards for tests, in a module that imports nothing, for a process of its own imports it."""


def vowels(completion: str, example: dict) -> float:
    """Something that random models differ in."""
    return sum(completion.count(letter) for letter in "aeiou") / 10


def failing(completion: str, example: dict) -> float:
    raise KeyError("no such thing")


def same(completion: str, example: dict) -> float:
    return 1.0
