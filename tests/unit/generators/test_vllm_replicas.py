"""Several replicas as one generator."""

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from automodel_rl.errors import InputError, WeightSyncError
from automodel_rl.generator_messages import Answer, Call, Committed, Failure, Message, Request, Sampling
from automodel_rl.generators.protocol import Completion, results
from automodel_rl.generators.vllm_replicas import WORKING_BYTES, VllmReplicas, cache_bytes
from automodel_rl.weight_sync.channel import call


class Replica:
    """Writes each prompt's first token. It answers what it is told to answer."""

    num_workers = 1

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answers: list[Message] = []
        self.sent: list[Message] = []
        self.asked = self.started = self.closed = 0
        self.warning = "old"
        self.completions: list[Future[Completion]] = []

    def ask_to_start(self) -> None:
        self.asked += 1

    def wait_for_start(self) -> None:
        self.started += 1

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        self.requests += requests
        self.completions += (own := [Future() for _ in requests])
        return own

    def finish(self) -> None:
        """Writes what it was asked for, the last first."""
        for request, completion in [*zip(self.requests, self.completions, strict=True)][::-1]:
            completion.set_result(Completion(request.prompt[:1], [0.0], "stop"))

    def close(self) -> None:
        self.closed += 1

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def ready(self) -> bool:
        return bool(self.answers)

    def receive(self) -> Message:
        return self.answers.pop(0)


def request(token: int, conversation: int | None = None) -> Request:
    return Request([token, 7], token, Sampling(3), conversation)


def two() -> tuple[VllmReplicas, list[Replica]]:
    replicas = [Replica(), Replica()]
    return VllmReplicas(replicas), replicas  # type: ignore[arg-type]


def test_completions_come_in_the_order_of_their_requests() -> None:
    several, replicas = two()
    tokens = [5, 5, 1, 2, 2, 3]
    completions = several.submit([request(token) for token in tokens])
    for replica in replicas:
        replica.finish()
    assert [completion.token_ids for completion in results(completions)] == [[token] for token in tokens]
    assert all(replica.requests for replica in replicas)


def test_a_prompt_goes_to_one_engine_and_prompts_are_shared_evenly() -> None:
    several, replicas = two()
    several.submit([request(token) for token in range(1, 9) for _ in range(4)])
    prompts = [[request.prompt[0] for request in replica.requests] for replica in replicas]
    assert len(prompts[0]) == len(prompts[1]) == 16
    assert not set(prompts[0]) & set(prompts[1])


def test_what_an_engine_still_writes_counts() -> None:
    several, replicas = two()
    several.submit([request(1)] * 5)
    several.submit([request(token) for token in (2, 3, 4)])
    assert [len(replica.requests) for replica in replicas] == [5, 3]


def test_turns_of_a_conversation_go_to_one_engine() -> None:
    several, replicas = two()
    for token in range(1, 5):
        several.submit([request(token, conversation=3)])
    assert [len(replica.requests) for replica in replicas] == [4, 0]


def test_conversations_that_a_fleet_has_dealt_by_their_number_are_shared_evenly() -> None:
    several, replicas = two()
    several.submit([request(number, conversation=2 * number) for number in range(8)])
    assert [len(replica.requests) for replica in replicas] == [4, 4]


def test_it_is_lost_if_one_engine_is() -> None:
    several, replicas = two()
    completions = several.submit([request(1), request(2)])
    replicas[1].completions[0].set_exception(RuntimeError("gone"))
    replicas[0].finish()
    with pytest.raises(RuntimeError, match="gone"):
        results(completions)


def test_all_engines_start_at_the_same_time_and_get_weights() -> None:
    several, replicas = two()
    meanwhile: list[list[tuple[int, int]]] = []
    several.start(lambda: meanwhile.append([(replica.asked, replica.started) for replica in replicas]))
    assert meanwhile == [[(1, 0), (1, 0)]]
    assert [replica.started for replica in replicas] == [1, 1]
    for replica in replicas:
        replica.answers.append(Answer("commit", Committed(4)))
    assert call(several, "commit", False, seconds=1.0) == Committed(4)
    assert all(replica.sent == [Call("commit", (False,))] for replica in replicas)


def test_a_weight_sync_fails_if_one_engine_fails() -> None:
    several, replicas = two()
    replicas[0].answers.append(Answer("load_weights"))
    assert not several.ready()
    replicas[1].answers.append(Failure("no room"))
    with pytest.raises(WeightSyncError, match="no room"):
        call(several, "load_weights", {}, seconds=1.0)


def test_if_one_does_not_start_all_are_closed() -> None:
    several, replicas = two()
    replicas[1].wait_for_start = lambda: (_ for _ in ()).throw(RuntimeError("no memory"))  # type: ignore[method-assign,misc]
    with pytest.raises(RuntimeError, match="no memory"):
        several.start()
    assert [replica.closed for replica in replicas] == [1, 1]


def test_a_replica_has_a_cache_of_what_remains_of_its_share() -> None:
    gib = 2**30
    bytes_of = cache_bytes(16 * gib, 1 * gib, vocab_size=2**15)
    assert bytes_of == 16 * gib - 1 * gib - WORKING_BYTES - 24 * 2**25
    assert cache_bytes(16 * gib, 1 * gib, vocab_size=2**15, sampled_at_once=256) > bytes_of


def test_replicas_without_room_for_a_cache_are_refused() -> None:
    with pytest.raises(InputError, match=r"each vLLM has 2\.0 GiB, but .* take 4\.8 GiB: use fewer replicas"):
        cache_bytes(2 * 2**30, 2**31, vocab_size=2**15)
