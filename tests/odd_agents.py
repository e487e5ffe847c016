"""Agents of the tests: well-behaved ones, and ones that raise, hang, fork, flood, or go on after the end."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from automodel_rl.rollout.agents.protocol import AgentEndpoint

Message = dict[str, Any]


def post(endpoint: AgentEndpoint, body: dict[str, Any], path: str = "chat/completions", **headers: str) -> Any:
    """The JSON of an answer, also of one that refuses."""
    data = json.dumps({"model": "any", **body}).encode()
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {endpoint.key}", **headers}
    request = urllib.request.Request(f"{endpoint.base_url}/{path}", data, sent)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def ask(endpoint: AgentEndpoint, messages: list[Message], **more: Any) -> Message:
    """The message of an answer."""
    found: Message = post(endpoint, {"messages": messages, **more})["choices"][0]["message"]
    return found


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def good(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    messages = [user(example["question"])]
    messages += [ask(endpoint, messages), user("Sure?")]
    return float(len(ask(endpoint, messages)["content"]))


async def parallel(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Three calls at once from one history."""
    messages = [user(example["question"])]
    messages.append(await asyncio.to_thread(ask, endpoint, messages))
    each = [asyncio.to_thread(ask, endpoint, [*messages, user(text)]) for text in ("One?", "Two?", "Three?")]
    return float(len(await asyncio.gather(*each)))


def raising(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    ask(endpoint, [user(example["question"])])
    raise ValueError("it went wrong")


def hanging(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    ask(endpoint, [user(example["question"])])
    time.sleep(1e6)
    return 1.0


def forking(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Leaves a process behind, in a session of its own, whose number it writes."""
    code = "import os, time; os.setsid(); time.sleep(1e6)"
    child = subprocess.Popen([sys.executable, "-c", code, "left behind"])
    with open(example["pids"], "a") as file:
        file.write(f"{child.pid}\n")
    ask(endpoint, [user(example["question"])])
    return 1.0


def flooding(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Calls far more often than it may, many times at once."""
    with ThreadPoolExecutor(16) as threads:
        answers = [*threads.map(lambda n: post(endpoint, {"messages": [user(f"Question {n}?")]}), range(200))]
    refused = [answer for answer in answers if answer.get("status") == 400]
    return float(len(refused) > 150)


def after_the_end(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Lets a child call when the agent has returned. What the child gets, it writes."""
    ask(endpoint, [user(example["question"])])
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.2)
        answer = post(endpoint, {"messages": [user("Still there?")]})
        with open(example["late"], "a") as file:
            file.write(f"{answer}\n")
        os._exit(0)
    return 1.0


def dying(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    ask(endpoint, [user(example["question"])])
    os.abort()


def silent(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Makes no call."""
    return 1.0


def without_reward(endpoint: AgentEndpoint, example: dict[str, Any]) -> None:
    ask(endpoint, [user(example["question"])])


def odd_reward(endpoint: AgentEndpoint, example: dict[str, Any]) -> Any:
    ask(endpoint, [user(example["question"])])
    return {"reward": 0.5, "steps": "many"}


def waiting_first(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Those of the first prompt wait for a file."""
    answer = ask(endpoint, [user(example["question"])])
    if example["number"] == 0:
        while not os.path.exists(example["waited_for"]):
            time.sleep(0.01)
        ask(endpoint, [user(example["question"]), answer, user("Sure?")])
    return 1.0


MIXED = (good, good, parallel, raising, hanging, forking, flooding, dying, silent, without_reward)


def mixed(endpoint: AgentEndpoint, example: dict[str, Any]) -> Any:
    """By the number of the prompt: nine of ten are good, and the others odd in every way."""
    number = example["number"]
    agent = good if number % 10 else MIXED[number // 10 % len(MIXED)]
    return agent(endpoint, example) if agent is not parallel else parallel(endpoint, example)


def vowels(text: str) -> int:
    return sum(letter in "aeiou" for letter in text)


def greeting(endpoint: AgentEndpoint, example: dict[str, Any]) -> dict[str, float]:
    """What the environment `Greeting` does."""
    *before, last = example["messages"]
    messages = [*before, {**last, "content": f"{last['content']} Say {endpoint.seed % 10}."}]
    first = post(endpoint, {"messages": messages})["choices"][0]
    reward = vowels(first["message"]["content"])
    if first["finish_reason"] == "stop":
        messages += [first["message"], user("1, and now?")]
        reward += vowels(ask(endpoint, messages)["content"])
    return {"reward": reward, "vowels": reward}


async def branching(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Goes on from one answer in several ways, some at once, and begins another conversation."""
    messages = [*example["messages"]]
    first = await asyncio.to_thread(post, endpoint, {"messages": messages})
    turn = first["choices"][0]["message"]
    texts = [turn["content"]]
    if first["choices"][0]["finish_reason"] == "stop":
        questions = ["And now?", "Why is that so?", "Who says that?"][: 1 + len(turn["content"]) % 3]
        each = [asyncio.to_thread(ask, endpoint, [*messages, turn, user(text)]) for text in questions]
        texts += [answer["content"] for answer in await asyncio.gather(*each)]
    texts.append((await asyncio.to_thread(ask, endpoint, [user("Something else.")]))["content"])
    return float(sum(map(vowels, texts)))


async def lone_sleeper(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Parallel calls; one agent of all sleeps meanwhile."""
    if os.path.basename(example["answer"]) == "0":
        await asyncio.sleep(2.0)
    return await branching(endpoint, example)


def half_a_message(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Writes the beginning of a message into every connection that it finds, and hangs for a while."""
    for descriptor in range(3, 64):
        try:
            socket.socket(fileno=os.dup(descriptor)).send(b"\0\0")
        except OSError:
            continue
    Path(example["flag"]).touch()
    time.sleep(20)
    return 0.0


def many_metrics(endpoint: AgentEndpoint, example: dict[str, Any]) -> dict[str, float]:
    ask(endpoint, [user(example["question"])])
    return {"reward": 1.0, **{f"metric_{number}": 0.0 for number in range(3000)}}


def replaying(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Sends requests that real clients have sent. Returns how many were answered."""
    ids: list[str] = []
    for asked in example["requests"]:
        text = json.dumps(asked["body"])
        for number, name in enumerate(ids):
            text = text.replace(f"ANSWER {number}", name)
        headers = {"Content-Type": "application/json", "X-API-Key": endpoint.key}
        request = urllib.request.Request(f"{endpoint.base_url}/{asked['path']}", text.encode(), headers)
        with urllib.request.urlopen(request) as answer:
            found = re.search(r'"(?:resp|msg|chatcmpl)[_-]([0-9a-f]{16})"', answer.read().decode())
        ids.append(found[1] if found else "")
    return float(len(ids))


def impatient(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Waits for an answer for less time than it takes, as often as OpenAI's client does by itself."""
    from openai import OpenAI

    client = OpenAI(timeout=1.0, max_retries=2)
    messages: Any = [user(example["question"])]
    turn = client.chat.completions.create(model=endpoint.model, messages=messages).choices[0].message
    messages += [turn, user("Sure?")]
    return float(
        len(client.chat.completions.create(model=endpoint.model, messages=messages).choices[0].message.content)
    )


def command(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """A program of the command line, which finds the endpoint by itself."""
    done = subprocess.run(example["command"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode or "done" not in done.stdout:
        raise RuntimeError(done.stderr[-150:])
    return 1.0


def odd_requests(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Requests that would break a generator. Returns how many were refused."""
    messages = [user(example["question"])]
    bodies = [
        *({"messages": messages, "stop": stop} for stop in ([5], [""], "", {"a": 1}, ["x"] * 99)),
        *({"messages": messages, "max_tokens": most} for most in (0, -5, 1.5, "7", True)),
    ]
    answers = [post(endpoint, body) for body in bodies]
    answers += [post(endpoint, {"input": "a", "max_output_tokens": most}, "responses") for most in (50.5, -5)]
    answers += [post(endpoint, {"messages": messages, "max_tokens": 5, "stop_sequences": [5]}, "messages")]
    ask(endpoint, messages, logprobs=False)
    return float(sum(answer.get("status") == 400 for answer in answers))


def stopping(endpoint: AgentEndpoint, example: dict[str, Any]) -> float:
    """Asks for turns that end with a text, and for some that end within a token. The generator of the tests goes on
    behind both."""
    question = [user(example["question"])]
    texts = [ask(endpoint, question, stop=[stop])["content"] for stop in ("ell", " you", "nowhere")]
    assert texts == ["h", "hello", "hello you"], texts
    return 1.0
