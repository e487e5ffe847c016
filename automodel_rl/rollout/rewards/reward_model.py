"""Reward model as a reward: in the reward's own process, or behind a vLLM server.

The model's score after the last token judges the whole chat, written by its own chat template. It may differ from the
policy in family and tokenizer.
"""

import asyncio
import functools
import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from automodel_rl.errors import InputError

PROMPT = "prompt_messages"
"""Key of an example for its prompt's messages."""

MESSAGES = "messages"
"""Key of an example for the whole conversation, if it has several turns."""

ANSWER_SECONDS = 60.0
"""Timeout of a request to the server, so that no thread waits forever."""

BATCH_TOKENS = 8192
"""Most tokens of a forward pass, with padding."""


def judged_chat(completion: str, example: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = example.get(MESSAGES)
    if "environment_reward" in example and messages:
        return list(messages)
    return [*example[PROMPT], {"role": "assistant", "content": completion}]


class RewardModel:
    """Scores chats with a sequence classifier of transformers.

    Args:
        path: folder or hub id of the model.
        dtype: "auto" is that of the checkpoint.

    Raises:
        InputError: it cannot be opened, gives several scores, or has no chat template.
    """

    def __init__(self, path: str, device: str = "cpu", dtype: str = "auto"):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            kind = dtype if dtype == "auto" else getattr(torch, dtype)
            self.model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=kind).to(device).eval()
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"rewards.model={path}: cannot be opened as a reward model ({reason})") from None
        if self.model.config.num_labels != 1 or "score" not in dict(self.model.named_children()):
            raise InputError(
                f"rewards.model={path}: not a model with one score (it has {self.model.config.num_labels} labels): use "
                "a model that was trained as a reward model"
            )
        if self.tokenizer.chat_template is None:
            raise InputError(f"rewards.model={path}: its tokenizer has no chat template: add one")

    def __call__(self, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]) -> list[float]:
        chats = [judged_chat(*pair) for pair in zip(completions, examples, strict=True)]
        rows = [self.tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        scores = [0.0] * len(rows)
        while order:
            longest = len(rows[order[-1]])
            taken = [order.pop() for _ in range(min(len(order), max(1, BATCH_TOKENS // max(longest, 1))))]
            for number, score in zip(taken, self._score([rows[number] for number in taken]), strict=True):
                scores[number] = score
        return scores

    def _score(self, rows: Sequence[list[int]]) -> list[float]:
        """Returns the score after the last token of each row. Does not use transformers' search for the last token
        that is not padding: rows may end with the padding token."""
        import torch

        longest, device = max(map(len, rows)), self.model.device
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        with torch.inference_mode():
            hidden = self.model.base_model(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
            ends = mask.sum(1).to(device) - 1
            scores: list[float] = self.model.score(hidden[torch.arange(len(rows)), ends])[:, 0].float().tolist()
        return scores


@functools.cache
def open_reward_model(path: str, device: str = "cpu", dtype: str = "auto") -> RewardModel:
    return RewardModel(path, device, dtype)


async def served_reward_model(completion: str, example: Mapping[str, Any], url: str, name: str, path: str) -> float:
    """Returns a completion's score by a reward model behind `vllm serve MODEL --runner pooling`.

    The chat is tokenised here: vLLM passes messages to templates in another form than transformers.

    Args:
        url: the server's address, such as http://host:8000.
        name: the model's name on the server.
        path: folder or hub id of its tokenizer.
    """
    ids = _tokenizer(path).apply_chat_template(judged_chat(completion, example), return_dict=False)
    body = {"model": name, "input": [ids], "use_activation": False}
    return await asyncio.to_thread(_post_json, f"{url.rstrip('/')}/classify", body)


@functools.cache
def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _post_json(url: str, body: dict[str, Any]) -> float:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        (probs,) = (found["probs"] for found in json.load(answer)["data"])
    if len(probs) != 1:
        raise ConnectionError(f"{url} returned {len(probs)} scores for {body['model']} instead of one")
    return float(probs[0])
