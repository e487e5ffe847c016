"""Data, rewards and generators of other trainers' runs."""

from typing import Any

from automodel_rl.tools.convert.conversion import Conversion

NAMED_REWARDS = {"accuracy": "math", "math": "math"}
"""Built-in rewards, by name in recipes of TRL and Open R1."""


def data(target: Conversion) -> None:
    """Training and held-out sources."""
    run = target.run
    splits = as_list(target.take("dataset_splits"))
    mixer = [name for name in run.settings if name.startswith("dataset_mixer.")]
    fractions = [target.take(name) for name in mixer]
    paths = [name.partition(".")[2] for name in mixer]
    train = [_source(path, split=splits[0] if splits else None) for path in paths]
    held_out = [_source(path, split=split) for path in paths for split in splits[1:]]
    for one in as_list(target.take("dataset_mixture.datasets")):
        train.append(_source(one.get("id"), one.get("config"), one.get("split")))
        fractions.append(one.get("weight"))
    if any(fraction not in (None, 1) for fraction in fractions):
        target.left_out["weights of the mixture"] = "all records are used; data.train.N.weight is a share of the draws"
    for one in [*as_list(target.take("datasets")), *as_list(target.take("pretraining_dataset"))]:
        if isinstance(one, dict):
            messages = one.get("field_messages")
            columns = {"messages": messages} if messages not in (None, "messages") else {}
            train.append(_source(one.get("path"), one.get("name"), one.get("split"), columns))
    subset = next(iter(as_list(target.take("dataset_config", "dataset_configs"))), None)
    split, of_test = target.take("dataset_train_split"), target.take("dataset_test_split")
    prompt, system = target.take("dataset_prompt_column"), target.take("system_prompt")
    columns = {"prompt": prompt} if prompt not in (None, "prompt") else {}
    for path in as_list(target.take("dataset_name")):
        train.append(_source(path, subset, split, columns) | ({"system": system} if system else {}))
        held_out += [_source(path, subset, of_test)] if of_test else []
    names = target.take("dataset")
    if isinstance(names, str):
        train += [_source(name.strip()) for name in names.split(",")]
        target.notes.append("data: names of LLaMA-Factory's dataset_info.json: replace them by files or datasets")
    target.take("dataset_dir")
    columns = {"answer": "reward_model.ground_truth"} if run.algorithm in ("grpo", "ppo") else {}
    prompt = target.take("data.prompt_key")
    columns |= {"prompt": prompt} if prompt not in (None, "prompt") and columns else {}
    train += [_source(path, columns=columns) for path in as_list(target.take("data.train_files"))]
    held_out += [_source(path, columns=columns) for path in as_list(target.take("data.val_files"))]
    _data_of_nemo_rl(target, train, held_out)
    if not train:
        train.append(_source("train.jsonl"))
        target.notes.append("data: no source was found: put yours in data.train")
    target.put("data.train", train, "")
    if held_out:
        target.put("data.validation", held_out, "")


def _data_of_nemo_rl(target: Conversion, train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    path = target.take("data.train_data_path", "data.train.data_path")
    own = {"prompt": target.take("data.input_key"), "completion": target.take("data.output_key")}
    named = target.take("data.train.dataset_name", "data.dataset_name")
    if path is not None:
        train.append(_source(path, columns={key: value for key, value in own.items() if value}))
    elif named is not None:
        train.append(_source(named))
        target.notes.append(f"data: {named} is prepared by NeMo RL itself: replace it by a file or dataset")
    path = target.take("data.val_data_path", "data.validation.data_path")
    held_out += [] if path is None else [_source(path)]
    rest = [name for name in target.run.settings if name.startswith(("data.train.", "data.validation."))]
    target.take(*rest)


def _source(path: Any, subset: Any = None, split: Any = None, columns: dict[str, Any] | None = None) -> dict[str, Any]:
    given = {"subset": subset, "split": split, "columns": columns}
    return {"path": str(path), **{key: value for key, value in given.items() if value}}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value in (None, "") else [value]


def rewards(target: Conversion) -> None:
    """Rewards: the built-in comparison with the answer where a trainer has it too, else a function to be written."""
    run = target.run
    names = [str(name) for name in as_list(target.take("reward_funcs"))]
    of_sections = ("env", "reward_model", "custom_reward_function")
    custom = [name for name in run.settings if name.partition(".")[0] in of_sections]
    own = [name for name in custom if name.startswith("custom_reward_function") and target.take(name)]
    target.take(*custom)
    built_in = [NAMED_REWARDS[name] for name in names if name in NAMED_REWARDS]
    if run.trainer in ("verl", "NeMo RL") and not own:
        built_in = ["math"]
        target.notes.append("rewards: math compares a completion's result with the record's answer")
    for name in names:
        if name not in NAMED_REWARDS:
            target.left_out[f"reward_funcs: {name}"] = "a function of the script: write it in my_rewards.py"
    if own or not built_in:
        target.notes.append("rewards: write my_rewards.py with async def score(completion, example) -> float")
    chosen = built_in if built_in and not own else ["my_rewards:score"]
    target.put("rewards", [{"function": name} for name in dict.fromkeys(chosen)], "")


def generator(target: Conversion) -> None:
    """vLLM, wherever a run has an inference engine."""
    kind = str(target.take("use_vllm", "actor_rollout_ref.rollout.name", "policy.generation.backend")).lower()
    target.take("vllm_mode", "vllm_device", "policy.generation.colocated.enabled")
    if kind in ("none", "false", "hf"):
        return
    target.put("rollout.generator.kind", "vllm", "")
    if kind not in ("true", "vllm"):
        target.left_out[kind] = "generators are transformers or vLLM: vLLM is used"
