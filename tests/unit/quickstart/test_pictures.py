"""The pictures of the demo: what they show is what their answers say, and nothing else does."""

from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image as Picture

from automodel_rl.quickstart.pictures import COLOURS, draw_pictures, make_pictures, undecided
from automodel_rl.quickstart.problems import as_prompt


def test_the_answer_is_the_colour_of_most_pixels(tmp_path: Path) -> None:
    train, held_out = make_pictures(20, 5, seed=0)
    draw_pictures([*train, *held_out], tmp_path)
    names = {colour: name for name, colour in COLOURS.items()}
    for chat in (*train, *held_out):
        with Picture.open(tmp_path / chat["images"][0]) as picture:
            pixels = Counter(map(tuple, np.asarray(picture).reshape(-1, 3).tolist()))
        (first, count), (_, other) = pixels.most_common()
        assert names[first] == chat["messages"][1]["content"]
        assert 1.5 * other < count


def test_only_the_picture_tells_the_answer() -> None:
    train, _ = make_pictures(300, 0, seed=0)
    prompts = [as_prompt(chat) for chat in train]
    assert all(prompt["prompt"] == prompts[0]["prompt"] for prompt in prompts)
    assert all(prompt["images"] == chat["images"] for prompt, chat in zip(prompts, train, strict=True))
    assert max(Counter(prompt["answer"] for prompt in prompts).values()) < 90  # of six colours


def test_the_warm_up_tells_names_and_not_sizes() -> None:
    train, _ = make_pictures(400, 0, seed=0)
    guesses = [chat["messages"][1]["content"] for chat in undecided(train, seed=0)]
    right = sum(guess == chat["picture"]["larger"] for guess, chat in zip(guesses, train, strict=True))
    assert 150 < right < 250
    assert all(
        guess in (chat["picture"]["larger"], chat["picture"]["smaller"])
        for guess, chat in zip(guesses, train, strict=True)
    )
