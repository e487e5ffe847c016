"""Sums log-probabilities as lm-eval's `local-completions` asks for them, and writes results as it does."""

import argparse
import json
import os
import sys
import threading
import urllib.request
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("--model", "--tasks", "--model_args", "--output_path", "--limit", "--ids"):
    parser.add_argument(name)
given = parser.parse_args()
if given.tasks == "broken":
    sys.exit("ValueError: no such task")
if given.tasks == "hanging":
    threading.Event().wait()
settings = dict(pair.split("=", 1) for pair in given.model_args.split(","))
ids = json.loads(given.ids)
body = {"model": settings["model"], "prompt": ids, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
data = json.dumps({**body, "echo": True}).encode()
with urllib.request.urlopen(urllib.request.Request(settings["base_url"], data, headers)) as answer:
    choices = json.load(answer)["choices"]
sums = [sum(choice["logprobs"]["token_logprobs"][1:-1]) for choice in choices]
greedy = [
    all(own == max(top.values()) for own, top in zip(choice["logprobs"]["token_logprobs"][1:-1],
                                                     choice["logprobs"]["top_logprobs"][1:-1], strict=True))
    for choice in choices
]  # fmt: skip
metrics = {"alias": given.tasks, "sum,none": sum(sums), "sum_stderr,none": 0.1, "acc,strict": sum(greedy) / len(greedy)}
folder = Path(given.output_path) / "policy"
folder.mkdir(parents=True)
(folder / "results_2026.json").write_text(json.dumps({"results": {given.tasks: metrics}}))
