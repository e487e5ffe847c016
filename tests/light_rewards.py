"""Rewards for tests, in a module that imports little, for a process of its own imports it."""

import os
import re


def vowels(completion: str, example: dict) -> float:
    """Something that random models differ in."""
    return sum(completion.count(letter) for letter in "aeiou") / 10


def vowels_and_pictures(completion: str, example: dict) -> float:
    """The same, of a record whose pictures can be found."""
    assert all(os.path.isfile(path) for path in example["images"])
    return vowels(completion, example)


def vowels_and_audio(completion: str, example: dict) -> float:
    """The same, of a record whose clips can be found."""
    frames = [frame for video in example["videos"] for frame in video]
    assert all(os.path.isfile(path) for path in (*example["audio"], *example["images"], *frames))
    return vowels(completion, example)


def failing(completion: str, example: dict) -> float:
    raise KeyError("no such thing")


def same(completion: str, example: dict) -> float:
    return 1.0


def vowels_of_some(completion: str, example: dict) -> float:
    """The same, but the same for all completions of every third prompt."""
    return 1.0 if int(example["answer"]) % 3 == 0 else vowels(completion, example)


def vowels_or_error(completion: str, example: dict) -> float:
    """Fails for some completions of every prompt."""
    if "e" in completion:
        raise KeyError("no such thing")
    return vowels(completion, example)


def turns(completion: str, example: dict) -> float:
    """The number of turns of a conversation, whose last one is the completion."""
    written = [message["content"] for message in example["messages"] if message["role"] == "assistant"]
    plain = re.sub(r"<\|\w+\|>", "", completion)  # contents of messages have no special tokens
    assert written[-1] == plain, (written[-1], completion)
    return float(len(written))
