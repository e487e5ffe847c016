"""How vLLM is driven in a process of its own: requests, weights in between, and an environment without this package.

A stand-in takes vLLM's place here; the real one is run on GPUs by benchmarks/grpo.py and benchmarks/vllm_sync.py.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Picture

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import VllmGeneratorConfig
from automodel_rl.config.rollout import WeightSyncConfig
from automodel_rl.errors import InputError, WeightSyncError
from automodel_rl.generator_messages import Committed, PromptMedia, Request, Sampling, VllmSettings
from automodel_rl.generators import vllm_child
from automodel_rl.generators.child_process import ChildProcess
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.generators.protocol import results
from automodel_rl.generators.visible_devices import VISIBLE
from automodel_rl.generators.vllm_child import WORKER, start_early
from automodel_rl.generators.vllm_process import start_vllm
from automodel_rl.generators.vllm_replicas import VllmReplicas
from automodel_rl.weight_sync.channel import call, expect, send_call
from tests.vllm_stand_in import NUMBERS, write_vllm
from tests.weights import send_weights

ENDS = (2, 4)
AGENT = "TORCHELASTIC_USE_AGENT_STORE"


@pytest.fixture
def python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_vllm(tmp_path, NUMBERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(AGENT, "True")


def make_process(**options: Any) -> GeneratorProcess:
    return start_vllm(sys.executable, VllmSettings({"model": "m", **options}, ENDS))


@pytest.mark.usefixtures("python_path")
def test_a_process_generates_takes_weights_and_says_when_it_is_gone() -> None:
    generator = make_process()
    try:
        requests = [Request([1, 2], seed, Sampling(3, 0.5, 0.5, 3)) for seed in (8, 9)]
        first, second = results(generator.submit(requests))
        assert (first.token_ids, second.token_ids) == ([1, 0, 2], [2, 0, 2])
        assert first.logprobs == [-0.5] * 3
        assert (first.finish, second.finish) == ("stop", "length")
        assert first.versions == (0, 0)
        (aborted,) = results(generator.submit([Request([1, 2], 7, Sampling(3, 0.5))]))
        assert (aborted.finish, aborted.error) == ("error", "the generator ended it: abort")
        call(generator, "init_transfer", {"buffers": []}, seconds=5.0)
        assert send_weights(generator, 4, "a", "b") == Committed(4)
        (after,) = results(generator.submit(requests[:1]))
        assert (after.token_ids, after.versions) == ([1, 2, 2], (4, 4))
        assert results(generator.submit([])) == []
        well, refused = results(generator.submit([requests[0], Request([99], 8, Sampling(3, 0.5))]))
        assert well == after
        assert refused.error == "the generator ended it: ValueError: the prompt is too long"
        assert results(generator.submit(requests[:1])) == [after]
        os.kill(generator.child.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="its process exited with code -9"):
            results(generator.submit(requests))
        with pytest.raises(WeightSyncError, match="its process exited with code -9"):
            send_weights(generator, 5, "a")
    finally:
        generator.close()


@pytest.mark.usefixtures("python_path")
def test_weights_that_a_process_cannot_load_leave_it_refusing_to_generate() -> None:
    generator = make_process()
    try:
        send_call(generator, "begin", 1, 5.0)
        send_call(generator, "load_weights", {"names": ["bad"]})
        with pytest.raises(WeightSyncError, match="ValueError: no parameter called bad"):
            expect(generator, "load_weights", 5.0)
        send_call(generator, "load_weights", {"names": ["a"]})  # were on their way
        send_call(generator, "commit", False)
        with pytest.raises(RuntimeError, match="no complete weights"):
            results(generator.submit([Request([1, 2], 8, Sampling(3, 0.5))]))
    finally:
        generator.close()


@pytest.mark.usefixtures("python_path")
def test_weights_come_between_two_steps_of_running_requests() -> None:
    generator = make_process()
    try:
        many = [Request([1, 2], 8, Sampling(3, 0.5))] * 200
        submitted = [generator.submit(many) for _ in range(20)]
        assert send_weights(generator, 1, "a") == Committed(1)
        versions = [completion.versions for completions in submitted for completion in results(completions)]
        assert set(versions) <= {(0, 0), (0, 1), (1, 1)}
        assert len(versions) == 4000
    finally:
        generator.close()
    assert "generator-messages" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.usefixtures("python_path")
def test_requests_in_the_middle_of_a_weight_sync_are_written_after_it() -> None:
    generator = make_process()
    try:
        request = Request([1, 2], 8, Sampling(3, 0.5))
        send_call(generator, "begin", 1, 5.0)
        completions = generator.submit([request])
        send_call(generator, "load_weights", {"names": ["a"]})
        expect(generator, "load_weights", 5.0)
        call(generator, "commit", False, seconds=5.0)
        assert [completion.versions for completion in results(completions)] == [(1, 1)]
        send_call(generator, "begin", 2, 5.0)
        completions = generator.submit([request])
        send_call(generator, "abort")
        with pytest.raises(RuntimeError, match="no complete weights"):
            results(completions)
    finally:
        generator.close()


@pytest.mark.usefixtures("python_path")
def test_a_process_that_was_started_early_is_the_generators_and_sees_its_devices_from_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 3 leads a generator of its own if each has one device, and none early if some may lead none. The process
    imports vLLM, which may look for devices, before it is told anything."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv(VISIBLE, raising=False)
    start_early(spec_of(tensor_parallel=2))
    assert not vllm_child._early
    start_early(spec_of())
    ((child,),) = vllm_child._early.values()
    start_early(spec_of())  # once
    assert f"{VISIBLE}=3" in Path(f"/proc/{child.process.pid}/environ").read_text().split("\0")
    generator = start_vllm(None, VllmSettings({"model": "m"}, ENDS), "3")
    assert isinstance(generator, GeneratorProcess)
    try:
        assert generator.child is child
        assert not vllm_child._early
        (completion,) = results(generator.submit([Request([1, 2], 8, Sampling(3, 0.5))]))
        assert completion.token_ids == [1, 0, 2]
    finally:
        generator.close()
    again = start_vllm(None, VllmSettings({"model": "m"}, ENDS))
    again.close()
    assert isinstance(again, GeneratorProcess)
    assert again.child is not child


@pytest.mark.usefixtures("python_path")
def test_a_process_that_was_started_early_for_other_devices_is_not_the_generators() -> None:
    start_early(spec_of())
    ((child,),) = vllm_child._early.values()
    generator = start_vllm(None, VllmSettings({"model": "m"}, ENDS), "5")
    try:
        assert isinstance(generator, GeneratorProcess)
        assert generator.child is not child
        assert f"{VISIBLE}=5" in Path(f"/proc/{generator.child.process.pid}/environ").read_text().split("\0")
        assert not vllm_child._early
    finally:
        generator.close()
    child.process.wait(10)


@pytest.mark.usefixtures("python_path")
def test_all_replicas_are_started_early() -> None:
    start_early(spec_of(replicas=3))
    (children,) = [[*of_key] for of_key in vllm_child._early.values()]
    generator = start_vllm(None, VllmSettings({"model": "m"}, ENDS), "0", num_replicas=3)
    try:
        assert isinstance(generator, VllmReplicas)
        assert {replica.child for replica in generator.replicas} == set(children)
        assert not vllm_child._early
    finally:
        generator.close()


@pytest.mark.usefixtures("python_path")
def test_an_interpreter_that_is_not_there_is_told_of_when_the_generator_starts() -> None:
    start_early(spec_of(python="/no/such/python"))
    assert not vllm_child._early


def spec_of(**choice: Any) -> GeneratorSpec:
    return GeneratorSpec(VllmGeneratorConfig(kind="vllm", **choice), 64, WeightSyncConfig())


@pytest.mark.usefixtures("python_path")
@pytest.mark.parametrize(
    ("python", "model", "message"),
    [
        ("/no/such/python", "m", "the interpreter for vLLM, /no/such/python: cannot be started"),
        (sys.executable, "missing", "failed to start .FileNotFoundError: no such model"),
    ],
)
def test_a_generator_that_does_not_start_is_bad_input(python: str, model: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        start_vllm(python, VllmSettings({"model": model}, ENDS))


@pytest.mark.usefixtures("python_path")
def test_a_process_says_the_routes_of_prompt_and_completion() -> None:
    for options, expected in (({}, None), ({"enable_return_routed_experts": True}, [[[2], [2]]] * 4)):
        generator = make_process(**options)
        try:
            (completion,) = results(generator.submit([Request([1, 2], 8, Sampling(3, 0.5))]))
            assert (None if completion.routes is None else completion.routes.tolist()) == expected
        finally:
            generator.close()


ALONE = """
import importlib.util, runpy, sys

assert not {*sys.modules} & {"automodel_rl", "torch", "numpy"}
assert importlib.util.find_spec("automodel_rl") is None
sys.path.insert(0, sys.argv[1])
runpy.run_path(sys.argv[2], run_name="__main__")
"""


@pytest.mark.usefixtures("python_path")
def test_the_worker_needs_neither_the_package_nor_what_it_is_installed_with(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(tmp_path), str(WORKER)]
    settings = VllmSettings({"model": "m", "logprobs_mode": "processed_logprobs"}, ENDS)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", AGENT)}
    generator = GeneratorProcess(ChildProcess(command, environment), settings)
    generator.start()
    try:
        assert send_weights(generator, 7, "a") == Committed(7)
        (completion,) = results(generator.submit([Request([1, 2], 8, Sampling(3, 0.5))]))
        assert (completion.token_ids, completion.finish, completion.versions) == ([1, 1, 2], "stop", (7, 7))
    finally:
        generator.close()


@pytest.mark.usefixtures("python_path")
def test_pictures_go_with_their_prompt_and_one_that_vllm_sees_otherwise_fails_its_completion(tmp_path: Path) -> None:
    Picture.new("RGB", (3, 5)).save(tmp_path / "three.png")
    picture = str(tmp_path / "three.png")
    prompt = [1, 7, 7, 7, 2, 7, 7, 7]
    both = tuple(
        PromptMedia("image", start, 3, (1, 2, 6), source)
        for start, source in ((1, picture), (5, Path(picture).read_bytes()))
    )
    generator = make_process()
    try:
        right = Request(prompt, 8, Sampling(3, 0.5), media=both)
        wrong = Request([1, 7, 7, 2], 8, Sampling(3, 0.5), media=(PromptMedia("image", 1, 2, (1, 2, 4), picture),))
        seen, otherwise = results(generator.submit([right, wrong]))
        assert (seen.token_ids, seen.finish, seen.num_cached) == ([1, 0, len(prompt)], "stop", 3)
        assert otherwise.finish == "error"
        assert "vLLM's image processor made a prompt of 5 tokens, but the trainer's has 4" in str(otherwise.error)
        assert send_weights(generator, 1, "a") == Committed(1)
        (after,) = results(generator.submit([right]))
        assert after.num_cached == 2  # embeddings of the old encoder are forgotten
    finally:
        generator.close()


@pytest.mark.usefixtures("python_path")
def test_a_message_that_is_not_for_vllm_is_refused_by_name() -> None:
    generator = make_process()
    try:
        send_call(generator, "allocate_buffers", 1, 1)
        with pytest.raises(WeightSyncError, match="received an unknown or unexpected message: allocate_buffers"):
            expect(generator, "allocate_buffers", 5.0)
    finally:
        generator.close()


@pytest.mark.usefixtures("python_path")
def test_a_worker_of_another_version_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automodel_rl.generator_messages.PROTOCOL", "of an older version")
    with pytest.raises(InputError, match="different versions of automodel_rl/generator_messages.py: restart"):
        make_process()


@pytest.mark.usefixtures("python_path")
@pytest.mark.parametrize("level", [1, 2])
def test_a_process_that_sleeps_writes_nothing_before_it_is_awake_and_has_weights(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    generator = make_process(enable_sleep_mode=True)
    requests = [Request([1, 2], 8, Sampling(3, 0.5))]
    try:
        written = generator.submit(requests * 50)
        for _ in range(2):  # the second time it is asleep already
            generator.sleep(level, 5.0)
        assert len(results(written)) == 50  # it wrote them first
        with pytest.raises(RuntimeError, match="it is asleep"):
            results(generator.submit(requests))
        generator.wake("weights", 5.0)
        with pytest.raises(RuntimeError, match="it is asleep"):
            results(generator.submit(requests))
        generator.wake("kv_cache", 5.0)
        if level == 2:
            with pytest.raises(RuntimeError, match="none followed a sleep"):
                results(generator.submit(requests))
            assert send_weights(generator, 3, "a") == Committed(3)
        (completion,) = results(generator.submit(requests))
        assert completion.versions == ((3, 3) if level == 2 else (0, 0))
        with pytest.raises(WeightSyncError, match="AssertionError"):
            generator.wake("kv_cache", 5.0)
    finally:
        generator.close()


@pytest.mark.usefixtures("python_path")
def test_completions_end_with_the_adapter_that_they_began_with_and_no_place_is_leaked(tmp_path: Path) -> None:
    generator = make_process(enable_lora=True, max_loras=3)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "some").touch()
    many = [Request([1, 2], 8, Sampling(3, 0.5))] * 50
    try:
        with pytest.raises(RuntimeError, match="no complete weights"):
            results(generator.submit(many))  # nothing is written by the base alone
        before: Any = None
        for version in range(1, 101):
            send_call(generator, "load_adapter", version, str(tmp_path / "adapters"))
            assert expect(generator, "load_adapter", 5.0) == Committed(version)
            written = generator.submit(many)
            if before is not None:
                assert {completion.versions for completion in results(before)} == {(version - 1, version - 1)}
            before = written
        send_call(generator, "load_adapter", 101, str(tmp_path / "not there"))
        with pytest.raises(WeightSyncError, match="FileNotFoundError"):
            expect(generator, "load_adapter", 5.0)
    finally:
        generator.close()
