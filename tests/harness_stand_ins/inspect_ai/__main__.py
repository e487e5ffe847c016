"""Asks a chat as inspect-ai does, and writes a log as it does."""

import argparse
import json
import os
import urllib.request
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("command")
parser.add_argument("task")
for name in ("--model", "--model-base-url", "--log-dir", "--log-format", "--display", "--max-connections", "--limit"):
    parser.add_argument(name)
given = parser.parse_args()
_, provider, model = given.model.split("/")
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ[provider.upper() + '_API_KEY']}"}
body = {"model": model, "messages": [{"role": "user", "content": "1 + 2 is"}], "max_tokens": 4, "temperature": 0.0}
url = f"{given.model_base_url}/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
scores = [{"name": "length", "metrics": {"mean": {"value": len(text)}, "stderr": {"value": 0.0}}}]
log = {"status": "success", "eval": {"task": given.task}, "results": {"scores": scores}}
Path(given.log_dir, "log.json").write_text(json.dumps(log))
