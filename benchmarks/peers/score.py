"""Share of prompts whose likeliest completion by vLLM has the right result: `score.py MODEL PROMPTS.jsonl TOKENS`."""

import json
import sys
from pathlib import Path

from math_verify import parse, verify
from vllm import LLM, SamplingParams


def main() -> None:
    model, prompts, tokens = sys.argv[1:4]
    with Path(prompts).open() as lines:
        examples = [json.loads(line) for line in lines]
    engine = LLM(model, dtype="bfloat16", max_model_len=1024, gpu_memory_utilization=0.3, enforce_eager=True)
    written = engine.chat(
        [example["prompt"] for example in examples], SamplingParams(temperature=0.0, max_tokens=int(tokens))
    )
    right = [
        verify(parse(f"${example['answer']}$"), parse(output.outputs[0].text))
        for example, output in zip(examples, written, strict=True)
    ]
    print(json.dumps({"accuracy": sum(right) / len(right), "example": written[0].outputs[0].text[:200]}))


if __name__ == "__main__":
    main()
