"""The tests that `make longer` has and `make test` has not, because others of each commit assert the same of another
family, layout or algorithm. `make faults` looks at the tests of each commit alone: what it plants is noticed there.
"""

import re
import tomllib
from collections.abc import Sequence, Set
from pathlib import Path

COVERING = {
    *("qwen3", "qwen3_moe", "llama", "granitemoehybrid", "gemma4_text", "lfm2_moe", "qwen3_5_text", "falcon_h1"),
    *("mimo_v2_flash", "glm_moe_dsa", "deepseek_v3", "gpt_oss", "afmoe", "helium", "olmo_hybrid", "phi3"),
    *("deepseek_v32", "kimi_linear", "nemotron", "nemotron_h"),
}
"""Families that together have every fact of `Family`; tests of every family run for them in each commit."""

TEMPLATES = {
    *("qwen3", "qwen3_training", "qwen3_6", "qwen3_vl", "gptoss", "llama3_2", "glm4moe", "gemma4_v5", "deepseekv3"),
    *("lfm2_2_5", "nemotron_3_nano", "cohere2", "phi3_5", "smolvlm"),
}
"""Chat templates, one or two of each developer."""

WHOLE_FILES = {
    "distributed/engine/test_reference_weights.py",
    "distributed/lora/test_vision.py",
    "distributed/model/test_compiled.py",
    "distributed/parallel/test_scale.py",
    "distributed/policy/test_golden_layouts.py",
    "distributed/ray/test_job.py",
    "distributed/serve/test_all_weights.py",
    "distributed/serve/test_teachers.py",
    "distributed/serve/test_vllm.py",
    "distributed/test_laptop.py",
    "distributed/test_notebooks.py",
    "distributed/trainers/test_chaos.py",
    "distributed/trainers/test_fuzz.py",
    "distributed/trainers/test_joined_generators.py",
    "unit/rollout/agents/test_real_clients.py",
}
"""Files of which each commit has no test."""

SETS = {"COVERING": COVERING, "TEMPLATES": TEMPLATES}

BY_FILE: dict[str, dict[str, list[str] | str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""What of each test stays in each commit; longer.toml says how."""

LONGER: dict[str, Sequence[str] | Set[str]] = {
    f"{file}::{test}": SETS[stays] if isinstance(stays, str) else stays
    for file, tests in BY_FILE.items()
    for test, stays in tests.items()
}


def is_longer(name: str) -> bool:
    """Whether a test belongs to `make longer`.

    Args:
        name: the test's id, below `tests/`.
    """
    function, _, parameters = name.partition("[")
    if function.partition("::")[0] in WHOLE_FILES:
        return True
    stays = LONGER.get(function)
    if stays is None:
        return False
    if isinstance(stays, Set):
        return stays.isdisjoint(re.split("[] -]", parameters))
    return not any(part in f"[{parameters}" for part in stays)
