"""What the probe of a generator's weights sees: rounding, and the weights that stay as they were, one after the other.

    python benchmarks/weight_probe.py MODEL PROMPTS.jsonl VLLM_PYTHON [--dtype bfloat16]

With changed weights in vLLM, every weight of the model is set back in turn, as if vLLM had kept the old one, and the
log-probabilities of what vLLM has written are compared again.
"""

import argparse
import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from automodel_rl import Fleet, Policy, Run, run_program
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.generators.weight_probe import WeightProbe
from automodel_rl.launch.local import free_port
from automodel_rl.model.perturbed_weights import FACTOR, STRIDE
from automodel_rl.parallel.sharding import local_tensor


def config_of(arguments: argparse.Namespace, output: str) -> GRPOConfig:
    return GRPOConfig.model_validate(
        {
            "output": output,
            "model": {"path": arguments.model, "dtype": arguments.dtype},
            "data": {"train": [{"path": arguments.prompts}]},
            "rollout": {
                "prompts": 1,
                "group_size": 2,
                "max_prompt_tokens": 128,
                "max_new_tokens": 64,
                "generator": {"kind": "vllm", "python": arguments.python},
            },
            "rewards": [{"function": "last_number"}],
            "batch": {"microbatch_tokens": 1024},
            "length": {"steps": 1},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("python")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}.items():
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "localhost"
    with tempfile.TemporaryDirectory() as folder:
        run_program(measure, config_of(arguments, f"{folder}/run"))


@torch.no_grad()
def measure(policy: Policy, fleet: Fleet, run: Run) -> None:
    policy.begin()
    fleet.start(run.config.generator_spec)
    probe = WeightProbe(run.config, policy, fleet, run.handle, run.tokenizer, print)

    def error(written: dict) -> float:
        rows = probe.rows([c for completions in written.values() for c in completions])
        return probe.distance(rows, rows["rollout_logprobs"], policy.logprobs(rows))

    fleet.sync()
    probe.ask()
    print(f"its own weights: {error(probe.written):.2g}")
    with policy.with_changed_weights():
        fleet.sync_again()
        probe.ask()
        written = probe.written
        print(f"changed weights: {error(written):.2g}")
        kinds = defaultdict(list)
        for name, parameter in run.handle.named_parameters():
            numbers = local_tensor(parameter).detach().view(-1)[::STRIDE]
            numbers.div_(FACTOR)
            kinds[re.sub(r"\d+", "*", name)].append(error(written))
            numbers.mul_(FACTOR)
    print("one weight as it was, least and most over layers:")
    for kind, errors in kinds.items():
        print(f"  {kind}: {min(errors):.2g} to {max(errors):.2g}")


if __name__ == "__main__":
    main()
