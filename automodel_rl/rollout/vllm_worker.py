"""The process in which vLLM runs. It stands alone, for vLLM may live in an environment that has nothing else of ours.

Pickled requests in on stdin, pickled (ok, result) out on what was stdout:

    {"start": options of vllm.LLM}                                        -> None
    {"generate": [(prompt, seed, temperature), ...], "sampling": options} -> [(token_ids, logprobs, finish), ...]
    {"load": folder with safetensors}                                     -> None

Checked with vLLM 0.23.0.
"""

import os
import pickle
import traceback
from typing import Any


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print
    engine: Any = None
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            result: Any = None
            if "start" in request:
                engine = start(request["start"])
            elif "load" in request:
                load(engine, request["load"])
            else:
                result = generate(engine, request["generate"], request["sampling"])
            answer = (True, result)
        except Exception as error:
            traceback.print_exc()
            answer = (False, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        pickle.dump(answer, answers)
        answers.flush()


def start(options: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(**options)


def load(engine: Any, folder: str) -> None:
    engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    engine.reset_prefix_cache()  # it holds keys and values of the old weights


def generate(engine: Any, requests: list[tuple[list[int], int, float]], sampling: dict[str, Any]) -> list[tuple]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
    parameters = [SamplingParams(seed=seed, temperature=t, logprobs=0, **sampling) for _, seed, t in requests]
    outputs = [output.outputs[0] for output in engine.generate(prompts, parameters, use_tqdm=False)]
    return [
        (
            list(output.token_ids),
            [scores[token].logprob for scores, token in zip(output.logprobs, output.token_ids, strict=True)],
            output.finish_reason,
        )
        for output in outputs
    ]


if __name__ == "__main__":
    main()
