"""Products of numbers as chats, which the model cannot compute but a tool can.

Answers repeat the formula, and two-digit numbers are one token, so the model soon learns to copy, which calls and
answers require.
"""

import ast
import operator
import random
from collections.abc import Callable

QUESTIONS = ("What is {x} * {y}?", "How much is {x} * {y}?", "Please work out {x} * {y}.")
TOOL_HINT_RATE = 0.5
"""Share of warm-up chats that ask for the tool and get a call. They teach the model to call it and to read its
result."""

TOOL_HINT = " Use the calculator."

UNPROMPTED_CALL_RATE = 0.23
"""Share of the other warm-up chats that call the tool. The rest guess."""

SMALLEST, LARGEST = 10, 99

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}

SCHEMA = {"type": "function", "function": {"name": "calculator"}}


def calculator(expression: str) -> str:
    """Works out a formula.

    Args:
        expression: Whole numbers with + - * and parentheses, such as 47 * 86.
    """
    if len(expression) > 80:
        raise ValueError("the formula is too long")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
            return OPERATORS[type(kind)](_value(left), _value(right))
    raise ValueError("a formula has whole numbers, + - * and parentheses")


def make_products(num_train: int, num_held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Returns training and held-out chats with a question and its answer. No held-out product is in the training
    set."""
    random_ = random.Random(seed)
    pairs = [(x, y) for x in range(SMALLEST, LARGEST + 1) for y in range(SMALLEST, LARGEST + 1)]
    random_.shuffle(pairs)
    chats = [_chat(random_.choice(QUESTIONS), x, y) for x, y in pairs[: num_train + num_held_out]]
    return chats[:num_train], chats[num_train:]


def _chat(question: str, x: int, y: int) -> dict:
    text = question.format(x=x, y=y)
    return {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{x} * {y} = {x * y}."}],
        "formula": f"{x} * {y}",
    }


def guessing(chats: list[dict], seed: int) -> list[dict]:
    """Returns the chats changed so that some ask for the tool, and most of the others guess, to the nearest
    thousand."""
    random_ = random.Random(seed)
    made = []
    for chat in chats:
        question, answer = chat["messages"]
        if is_asked := random_.random() < TOOL_HINT_RATE:
            question = {**question, "content": question["content"] + TOOL_HINT}
        if is_asked or random_.random() < UNPROMPTED_CALL_RATE:
            call = {"name": "calculator", "arguments": {"expression": chat["formula"]}}
            turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            told = {"role": "tool", "name": "calculator", "content": calculator(chat["formula"])}
            messages = [question, turn, told, answer]
        else:
            guess = round(int(calculator(chat["formula"])), -3)
            messages = [question, {"role": "assistant", "content": f"{chat['formula']} is about {guess}."}]
        made.append({"messages": messages, "tools": [SCHEMA]})
    return made
