"""Agents whose histories fork: every layout trains what plain transformers would, row by row, and log-probabilities
that are computed again are those of the generator."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.generators.protocol import Branch, Completion, Conversation
from automodel_rl.losses import Readout
from automodel_rl.optimizers import AdamWSettings
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.groups import Group
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rewards.scorer import Score
from automodel_rl.trainers import rollout_batch
from automodel_rl.trainers.online import policy_loss
from tests.distributed.policy.programs import use
from tests.distributed.trainers.runs import (
    Settings,
    add_turns,
    copy_with_frequent_ends,
    metrics_of,
    rollouts_of,
    settings_of,
    train,
)
from tests.rank_pool import RankPool

NORMALISE = ("token", "sequence", "constant")
EPISODES = (
    (("p5 S4 t3 S2", 1.0), ("p5 s4 t2 S3",)),
    (("p7 S6", 0.25), ()),
    (("p4 S3", -0.5), ("p9 S2 t4 S5", "p9 s2 t1 S1")),
    (("p3 S2 t2 S8", 0.0), ()),
    (("p6 S1", 0.75), ("p2 S9",)),
)
"""Episodes of two groups: the row of the last call with the reward, and the others. Of each row p, t, s, S: tokens of
the prompt, of tools, sampled and counted in another row, sampled and counted here."""

GROUPS = ((0, 1, 2), (3, 4))


def branch_of(text: str, generator: torch.Generator) -> Branch:
    (_, num_prompt), *pieces = [(piece[0], int(piece[1:])) for piece in text.split()]
    counts = [kind == "S" for kind, number in pieces for _ in range(number)]
    draw = functools.partial(torch.randint, 1, 90, generator=generator)
    return Branch(draw((num_prompt,)).tolist(), draw((len(counts),)).tolist(), [-1.0] * len(counts), counts)


def groups_of() -> list[Group]:
    generator = torch.Generator().manual_seed(3)
    prompt: Any = SimpleNamespace(token_ids=[], media=())
    episodes = []
    for (main, reward), others in EPISODES:
        own = branch_of(main, generator)
        conversation = Conversation(own.prompt, own.sampled, branches=[branch_of(one, generator) for one in others])
        completion = Completion(own.token_ids, own.logprobs, "stop", conversation=conversation)
        episodes.append(Rollout(completion, "", Score(reward, (reward,), ("",))))
    rewards = torch.tensor([reward for (_, reward), _ in EPISODES], dtype=torch.float64)
    return [Group(prompt, [episodes[n] for n in places], rewards[[*places]]) for places in GROUPS]


def config_of(normalise: str) -> GRPOConfig:
    return GRPOConfig.model_validate(
        {
            "output": "run",
            "model": {"path": "nowhere"},
            "data": {"train": [{"path": "nowhere.jsonl"}]},
            "rewards": [{"function": "environment"}],
            "rollout": {
                "prompts": 2,
                "group_size": 3,
                "agent": "a:b",
                "max_prompt_tokens": 8,
                "max_new_tokens": 8,
                "max_tokens": 16,
            },
            "loss": {"normalise": normalise, "max_completion_tokens": 9, "on_policy": True},
            "advantage": {"kind": "dr_grpo"},
            "batch": {"microbatch_tokens": 24},
            "length": {"steps": 1},
        }
    )


def trained(policy: Policy, output: Path) -> dict[str, Any]:
    """One step for each way of averaging, from the same weights; the weights after the last of them are saved."""
    found = {}
    policy.begin()
    for normalise in NORMALISE:
        config, groups = config_of(normalise), groups_of()
        batch = rollout_batch.batch_of(groups, config)
        batch["advantages"] = rollout_batch.advantages_of(groups, batch, config)
        loss, _ = policy.forward_backward(batch, policy_loss(config), Readout(entropy=True))
        step = policy.optimizer_step(AdamWSettings(lr=0.0))
        found[normalise] = [loss, step.grad_norm]
    policy.forward_backward(batch, policy_loss(config), Readout(entropy=True))
    policy.optimizer_step(AdamWSettings(lr=1.0, eps=1.0, betas=(0.0, 0.0)))
    policy.save(output)
    return found


def by_hand(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, norms, and weights with gradients of the last way, by plain transformers, one row at a time."""
    found, rows = {}, {}
    for normalise in NORMALISE:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        num_counted = sum(sum(b.sampled) for g in groups_of() for r in g.rollouts for b in r.branches(g.prompt))
        for group in groups_of():
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
                branches = rollout.branches(group.prompt)
                of_episode = sum(sum(branch.sampled) for branch in branches)
                divisor = {"token": num_counted, "sequence": of_episode * len(EPISODES), "constant": 9 * len(EPISODES)}
                for branch in branches:
                    ids = torch.tensor([branch.prompt + branch.token_ids])
                    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                    counts = torch.tensor([False] * len(branch.prompt) + branch.sampled)[1:]
                    ratio = (logprobs - logprobs.detach()).exp()[counts]
                    total = total - (reward - group.rewards.mean()) * ratio.sum() / divisor[normalise]
        total.backward()
        rows = {name: weight.grad for name, weight in model.named_parameters()}
        norm = torch.stack([gradient.square().sum() for gradient in rows.values()]).sum().sqrt()
        found[normalise] = [total.item(), norm.item()]
    return found, {name: weight.detach() for name, weight in model.named_parameters()}, rows


LAYOUTS: dict[str, dict[str, int]] = {"dp": {"dp_shard": 2}, "pp": {"pp": 2}, "cp": {"cp": 2}}


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradient_of_branches_are_those_of_their_rows_by_hand(
    ranks: RankPool, workspace: Path, tmp_path: Path, name: str
) -> None:
    model = workspace / "model"
    expected, weights, gradients = by_hand(model)
    program, tokenizer = functools.partial(trained, output=tmp_path / "out"), AutoTokenizer.from_pretrained(model)
    found = ranks(2).run(use, model, LAYOUTS[name], program, tokenizer)[0]
    for normalise in NORMALISE:
        assert found[normalise] == pytest.approx(expected[normalise], rel=1e-9, abs=1e-12), normalise
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).state_dict()
    for parameter, weight in weights.items():
        gradient = gradients[parameter]
        assert torch.allclose(after[parameter], weight - gradient / (gradient.abs() + 1), rtol=0, atol=1e-9), parameter


@pytest.fixture(name="ending", scope="module")
def make_ending(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, but it ends its turns more often."""
    folder = tmp_path_factory.mktemp("ending") / "model"
    copy_with_frequent_ends(workspace / "model", folder)
    return folder


def values(ending: Path, workspace: Path, output: Path, agent: str, **changes: Any) -> Settings:
    settings = settings_of("grpo", workspace, output, length={"steps": 2}, **changes)
    settings["model"]["path"] = str(ending)
    add_turns(settings)
    settings["rollout"] |= {"agent": f"tests.odd_agents:{agent}", "environment": None, "max_turns": 8}
    settings["rewards"] = [{"function": "environment"}]
    return settings


PLACES: list[tuple[str, int, dict[str, int], dict[str, Any]]] = [
    ("pp", 2, {"pp": 2}, {}),
    ("dp", 2, {"dp_shard": 2}, {"generator": {"kind": "transformers", "place": "shared"}}),
    ("cp", 2, {"cp": 2}, {"max_episodes": 2}),
]


def test_branching_agents_train_alike_on_every_layout_with_every_generator(
    ranks: RankPool, ending: Path, workspace: Path, tmp_path: Path
) -> None:
    loss = {"normalise": "sequence", "kl": {"coefficient": 0.05}}
    ranks(1).run(train, values(ending, workspace, tmp_path / "one", "branching", loss=loss))
    for metrics in metrics_of(tmp_path / "one"):
        records = rollouts_of(tmp_path / "one", metrics["step"])
        assert metrics["train/logprob_error"] == pytest.approx(1, abs=1e-7)
        assert metrics["train/num_tokens"] == sum(record["sampled"] for record in records)
        assert metrics["rollout/rows_mean"] == sum(record["turns"]["rows"] for record in records) / len(records)
        assert metrics["rollout/rows_mean"] > 1.5
        assert metrics["rollout/new_roots"] >= len(records)
        assert {kind for record in records for kind in (turn["kind"] for turn in record["tree"])} >= {"first", "root"}
    for name, size, parallel, rollout in PLACES:
        settings = values(ending, workspace, tmp_path / name, "branching", loss=loss, parallel=parallel)
        settings["rollout"] |= rollout
        ranks(size).run(train, settings)
        for metrics, expected in zip(metrics_of(tmp_path / name), metrics_of(tmp_path / "one"), strict=True):
            for key in ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/num_tokens"):
                assert metrics[key] == pytest.approx(expected[key], rel=1e-7), (name, key)


def test_an_agent_trains_what_an_environment_does(
    ranks: RankPool, ending: Path, workspace: Path, tmp_path: Path
) -> None:
    settings = values(ending, workspace, tmp_path / "environment", "greeting")
    settings["rollout"] |= {"agent": None, "environment": "tests.odd_environments:Greeting"}
    ranks(1).run(train, settings)
    ranks(1).run(train, values(ending, workspace, tmp_path / "agent", "greeting"))
    for step in (1, 2):
        found, expected = (rollouts_of(tmp_path / name, step) for name in ("agent", "environment"))
        for key in ("completion", "reward", "tokens", "sampled"):
            assert [record[key] for record in found] == [record[key] for record in expected], key
        assert {record["turns"]["turns"] for record in found} > {1}
    for metrics, expected in zip(metrics_of(tmp_path / "agent"), metrics_of(tmp_path / "environment"), strict=True):
        for key in ("train/loss", "train/grad_norm", "train/num_tokens", "rollout/reward_mean"):
            assert metrics[key] == pytest.approx(expected[key], rel=1e-12), key


def test_many_agents_of_which_one_sleeps_do_not_wait_for_each_other(
    ranks: RankPool, ending: Path, workspace: Path, tmp_path: Path
) -> None:
    settings = values(ending, workspace, tmp_path, "lone_sleeper", parallel={"dp_shard": 2})
    settings["rollout"] |= {"prompts": 16, "group_size": 4}
    ranks(2).run(train, settings)
    for metrics in metrics_of(tmp_path):
        assert metrics["rollout/failed"] == 0
        assert metrics["rollout/agents_not_done"] == 0
