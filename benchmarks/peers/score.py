"""Share of prompts whose likeliest completion by vLLM ends with the right number: `score.py MODEL PROMPTS TOKENS`."""

import json
import re
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    model, prompts, tokens = sys.argv[1:4]
    with Path(prompts).open() as lines:
        examples = [json.loads(line) for line in lines]
    engine = LLM(model, dtype="bfloat16", max_model_len=1024, gpu_memory_utilization=0.3, enforce_eager=True)
    written = engine.chat(
        [example["prompt"] for example in examples], SamplingParams(temperature=0.0, max_tokens=int(tokens))
    )
    texts = [output.outputs[0].text for output in written]
    right = [
        last_number(text) == float(example["answer"].replace(",", ""))
        for example, text in zip(examples, texts, strict=True)
    ]
    print(json.dumps({"accuracy": sum(right) / len(right), "example": texts[0][:200]}))


def last_number(text: str) -> float | None:
    """The text's last number, as this package's reward of that name reads it; None if there is none."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None


if __name__ == "__main__":
    main()
