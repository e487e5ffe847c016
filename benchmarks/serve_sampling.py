"""Sampling in the service: transformers against vLLM, and whether both sample from the weights that were trained.

    python benchmarks/serve_sampling.py --generators transformers vllm --vllm-python /path/to/python
    python benchmarks/serve_sampling.py --tiny                       check the script on a CPU, without vLLM

W1 in bf16. Two runs, with adapters of rank 8 and 16, or one of all weights, take a step that changes their weights.
Then completions of at most 256 tokens of 16 prompts are sampled from each. Prints a JSON line for each run: seconds,
tokens per second, and the mean difference of the samples' log-probabilities from those that the trained model gives.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
import yaml
from tinker import types
from workload import TINY, WORKLOADS, write_model

from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.quickstart.model import train_tokenizer

PROMPTS, PROMPT_TOKENS = 16, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--generators", nargs="+", default=["transformers"], choices=("transformers", "vllm"))
    parser.add_argument("--samples", type=int, default=16, help="completions of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a completion")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    sizes = WORKLOADS["W1"] | (TINY if options.tiny else {})
    folder = Path(tempfile.gettempdir()) / f"automodel_rl_sampling{'_tiny' if options.tiny else ''}"
    if not (folder / "tokenizer.json").is_file():
        write_model(folder, sizes)
        train_tokenizer(["a few words"], 300).save_pretrained(folder)
    vllm = {"kind": "vllm", "python": options.vllm_python, "memory_fraction": 0.3}
    for generator in [
        {"transformers": {"kind": "transformers", "batch_size": 256}, "vllm": vllm}[name] for name in options.generators
    ]:
        for lora in ({"rank": 16}, None):
            with service(folder, lora, generator) as client:
                for rank in (8, 16) if lora else (0,):
                    numbers = measured(client, folder, rank, sizes["vocab_size"], options)
                    print(json.dumps({"generator": generator["kind"], **numbers}), flush=True)


@contextlib.contextmanager
def service(folder: Path, lora: dict[str, int] | None, generator: dict[str, Any]) -> Iterator[Any]:
    """A client of a service that runs meanwhile."""
    model = {"path": str(folder), "dtype": "bfloat16" if torch.cuda.is_available() else "float32", "lora": lora}
    with tempfile.TemporaryDirectory() as output:
        values = {"output": output, "model": model, "port": 0, "microbatch_tokens": 8192, "generator": generator}
        config = Path(output) / "serve.yaml"
        config.write_text(yaml.safe_dump(values))
        command = [sys.executable, "-m", "automodel_rl", "serve", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "TINKER_BASE_URL" in line)
            url, key = (word.partition("=")[2] for word in line.split()[1:])
            client: Any = tinker.ServiceClient(base_url=url, api_key=key)
            client.page = f"{url}/?key={key}"
            try:
                yield client
            finally:
                server.kill()


def measured(client: Any, folder: Path, rank: int, vocab_size: int, options: argparse.Namespace) -> dict[str, Any]:
    random = np.random.default_rng(rank)

    def tokens(count: int) -> list[int]:
        return random.integers(1, vocab_size, count).tolist()

    run = client.create_lora_training_client(base_model=str(folder), rank=rank).result()
    inputs: Any = {"target_tokens": tokens(500), "weights": [1.0] * 500}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens(500)), loss_fn_inputs=inputs)
    run.forward_backward([datum], "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=1e-2 if rank else 1e-4)).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    prompts = [types.ModelInput.from_ints(tokens(PROMPT_TOKENS)) for _ in range(PROMPTS)]
    seconds = []
    for repetition in range(3):  # the first one gives the generator its weights
        params = types.SamplingParams(max_tokens=options.tokens, temperature=1.0, seed=1000 * repetition)
        started = time.perf_counter()
        sent = [sampler.sample(prompt, num_samples=options.samples, sampling_params=params) for prompt in prompts]
        found = [future.result().sequences for future in sent]
        seconds.append(time.perf_counter() - started)
    written = sum(len(sequence.tokens) for of_prompt in found for sequence in of_prompt)
    differences = []
    for prompt, of_prompt in zip(prompts, found, strict=True):
        whole = types.ModelInput.from_ints([*prompt.to_ints(), *of_prompt[0].tokens])
        scored = sampler.compute_logprobs(whole).result()[PROMPT_TOKENS:]
        differences += [abs(own - other) for own, other in zip(of_prompt[0].logprobs, scored, strict=True)]
    return {
        "rank": rank,
        "seconds": [round(one, 2) for one in seconds],
        "tokens_per_second": round(written / seconds[-1]),
        "logprob_difference": float(f"{statistics.fmean(differences):.3g}"),
        "largest": float(f"{max(differences):.3g}"),
    }


if __name__ == "__main__":
    main()
