"""Files of chats with media, in the form of each trainer."""

import json
from pathlib import Path


def write_chats(folder: Path, chats: list[dict], columns: tuple[str, ...]) -> None:
    """Writes `train.jsonl` and, with the first four chats, `held_out.jsonl`, for sft, as pairs and as prompts.

    Args:
        folder: where the files go.
        chats: chats of a question and an answer.
        columns: the columns with media, which every pair and prompt has.
    """

    def prompt(chat: dict) -> dict:
        question, answer = chat["messages"]
        return {"prompt": [question], "answer": answer["content"], **{name: chat.get(name, []) for name in columns}}

    def pair(chat: dict) -> dict:
        return prompt(chat) | {"chosen": chat["messages"][1]["content"], "rejected": "What is this? And this?"}

    for name, part in (("train", chats[4:]), ("held_out", chats[:4])):
        for ending, form in (("", dict), ("_pairs", pair), ("_prompts", prompt)):
            (folder / f"{name}{ending}.jsonl").write_text("".join(json.dumps(form(chat)) + "\n" for chat in part))
