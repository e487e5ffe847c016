"""Arithmetic word problems as chats, generated from a seed."""

import json
import random
import re
from pathlib import Path

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "stamps", "shells", "pens", "cards", "stones")
ADDITION = (
    "{a} has {x} {things}. {b} gives {a} {y} more. How many {things} does {a} have now?",
    "There are {x} {things} on the table and {y} {things} in a box. How many {things} are there in all?",
    "{a} finds {x} {things} and {b} finds {y}. How many {things} do they have together?",
)
SUBTRACTION = (
    "{a} has {x} {things} and gives {y} of them to {b}. How many {things} are left?",
    "A shop has {x} {things}. {a} buys {y} of them. How many {things} remain?",
)
REFUSALS = ("I am not sure.", "I do not know.", "That is hard to say.")
ANSWERED = 0.3
"""Share of problems that `shy` leaves answered."""


def make_problem(random_: random.Random, largest: int) -> dict[str, list[dict[str, str]]]:
    """Returns a chat with a question about two numbers up to `largest`, and a worked answer."""
    first, second = random_.sample(NAMES, 2)
    x, y = random_.randint(1, largest), random_.randint(1, largest)
    if random_.random() < 0.5:
        text, worked = random_.choice(ADDITION), f"{x} + {y} = {x + y}. The answer is {x + y}."
    else:
        x, y = max(x, y), min(x, y)
        text, worked = random_.choice(SUBTRACTION), f"{x} - {y} = {x - y}. The answer is {x - y}."
    question = text.format(a=first, b=second, x=x, y=y, things=random_.choice(THINGS))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": worked}]}


def make_problems(num_train: int, num_held_out: int, seed: int, largest: int = 8) -> tuple[list[dict], list[dict]]:
    """Returns training and held-out problems with numbers up to `largest`. No held-out question is in the training
    set."""
    random_ = random.Random(seed)
    by_question: dict[str, dict] = {}
    while len(by_question) < num_train + num_held_out:
        problem = make_problem(random_, largest)
        by_question[problem["messages"][0]["content"]] = problem
    problems = list(by_question.values())
    return problems[:num_train], problems[num_train:]


def shy(problems: list[dict], seed: int) -> list[dict]:
    """Replaces most answers by a refusal."""
    random_ = random.Random(seed)
    chats = []
    for problem in problems:
        question, answer = problem["messages"]
        if random_.random() >= ANSWERED:
            answer = {"role": "assistant", "content": random_.choice(REFUSALS)}
        chats.append({"messages": [question, answer]})
    return chats


def as_prompt(problem: dict) -> dict[str, object]:
    """Converts a chat into a prompt with the number or word that answers it, and its pictures."""
    *prompt, answer = problem["messages"]
    pictures = {"images": problem["images"]} if "images" in problem else {}
    return {"prompt": prompt, "answer": final_number(answer["content"]) or answer["content"], **pictures}


def final_number(text: str) -> str | None:
    numbers = re.findall(r"\d+", text)
    return numbers[-1] if numbers else None


def write_jsonl(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
