"""Two-colour pictures, and chats that ask which colour is larger. Only the picture has the answer."""

import random
from pathlib import Path

from PIL import Image as Picture

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 190, 60),
    "blue": (50, 70, 230),
    "yellow": (240, 220, 50),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}
QUESTION = "Which colour is larger?"
SIDES = (48, 64, 80)
"""Heights and widths of pictures in pixels: three to five image tokens."""

SMALLER = (0.1, 0.35)
"""Range of the smaller colour's share of the picture."""


def make_pictures(num_train: int, num_held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Returns training and held-out chats about a picture; their key `picture` says how to draw it."""
    random_ = random.Random(seed)
    chats = [_chat(random_, number) for number in range(num_train + num_held_out)]
    return chats[:num_train], chats[num_train:]


def _chat(random_: random.Random, number: int) -> dict:
    smaller, larger = random_.sample([*COLOURS], 2)
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    return {
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": larger}],
        "images": [f"{number}.png"],
        "picture": {
            "smaller": smaller,
            "larger": larger,
            "share": random_.uniform(*SMALLER),
            "edge": random_.choice(["left", "right", "top", "bottom"]),
            "size": [random_.choice(SIDES), random_.choice(SIDES)],
        },
    }


def undecided(chats: list[dict], seed: int) -> list[dict]:
    """Replaces each answer by one of the picture's colours at random: the model learns the names of colours, but not
    which is larger."""
    random_ = random.Random(seed)
    made = []
    for chat in chats:
        question, answer = chat["messages"]
        guess = random_.choice([chat["picture"]["smaller"], chat["picture"]["larger"]])
        made.append({**chat, "messages": [question, {**answer, "content": guess}]})
    return made


def draw_pictures(chats: list[dict], folder: Path) -> None:
    for chat in chats:
        what, (file,) = chat["picture"], chat["images"]
        width, height = what["size"]
        picture = Picture.new("RGB", (width, height), COLOURS[what["larger"]])
        x, y = round(width * what["share"]), round(height * what["share"])
        boxes = {
            "left": (0, 0, x, height),
            "right": (width - x, 0, width, height),
            "top": (0, 0, width, y),
            "bottom": (0, height - y, width, height),
        }
        picture.paste(COLOURS[what["smaller"]], boxes[what["edge"]])
        picture.save(folder / file)
