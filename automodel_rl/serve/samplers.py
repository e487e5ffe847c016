"""Samplers: the weights that clients sample from, and the jobs of their prompts."""

from typing import TYPE_CHECKING, Any

from automodel_rl.errors import InputError
from automodel_rl.rollout.sampled import SamplePrompt
from automodel_rl.serve import checks
from automodel_rl.serve.messages import SampleJob, ServiceJob, TeacherJob
from automodel_rl.serve.requests import SampleBody, SamplingSessionBody
from automodel_rl.serve.results import digest_of
from automodel_rl.serve.tables import UnknownError, Weights
from automodel_rl.serve.wire import write_samples

if TYPE_CHECKING:
    from automodel_rl.serve.service import Service


MAX_SAMPLERS = 10_000
"""Most samplers per session."""


class Samplers:
    """All samplers of the server.

    Attributes:
        table: weights by sampler name.
    """

    def __init__(self, service: "Service"):
        self.service, self.config = service, service.config
        self.table: dict[str, Weights] = {}

    def create(self, body: SamplingSessionBody) -> dict[str, Any]:
        self.service.session(body.session_id)
        name, weights = f"{body.session_id}:sample:{body.sampling_session_seq_id}", self._asked(body)
        of_session = sum(one.startswith(f"{body.session_id}:") for one in self.table)
        if name not in self.table and of_session >= MAX_SAMPLERS:
            raise InputError(f"the session {body.session_id!r} has {of_session} samplers: start another session")
        if self.table.setdefault(name, weights) != weights:
            raise InputError(
                f"sampling_session_seq_id={body.sampling_session_seq_id}: this number belongs to a sampler of other "
                "weights: use a new number"
            )
        return {"sampling_session_id": name}

    def _asked(self, body: SamplingSessionBody) -> Weights:
        """Returns the requested weights. Raises InputError if there are none."""
        base, name = self.config.base_name, body.base_model
        if body.model_path is not None:
            if name not in (None, base):
                raise InputError(f"base_model={name!r}: {body.model_path} belongs to {base!r}: remove base_model")
            return Weights(saved=self.service.saved.usable(body.model_path))
        if name in self.config.teachers:
            return Weights(teacher=name)
        checks.check_base_model(name, self.config)
        return Weights()

    def describe(self, name: str) -> dict[str, Any]:
        weights = self._sampler(name)
        path = None if weights.saved is None else weights.saved.path
        base = weights.teacher or self.config.base_name
        return {"sampler_id": name, "base_model": base, "model_path": path}

    def sample(self, body: SampleBody) -> dict[str, Any]:
        weights = self._sampler(body.sampling_session_id)
        request = f"{body.sampling_session_id}:{body.seq_id}"
        digest = digest_of("asample", body)
        if not self.service.results.repeats(request, digest):
            ranks, teacher = self.service.ranks, weights.teacher
            size = ranks.vocab_size if teacher is None else ranks.teacher_vocab_sizes[teacher]
            prompt = checks.prompt_of(body, self.config, size)
            if teacher is not None:
                checks.check_scored(prompt, teacher)

            def done(answers: Any) -> Any:
                self.service.history.add_samples(body.sampling_session_id, [prompt], answers)
                named = body.target_prompt_logprobs
                return write_samples(answers[0], prompt.scoring, None if named is None else named.positions)

            size = checks.bytes_of_prompt(prompt)
            self.service.start(request, digest, None, self.job(weights, [prompt]), done, size)
        names = [f"{request}:{number}" for number in range(body.num_samples)]  # one per requested completion
        return {"request_id": request, "sample_sequence_ids": names}

    def job(self, weights: Weights, prompts: list[SamplePrompt]) -> ServiceJob:
        if weights.teacher is not None:
            return TeacherJob(weights.teacher, prompts)
        if weights.saved is None:
            return SampleJob(weights.kept, None, None, prompts)
        return SampleJob(None, str(weights.saved.folder), weights.saved.shape, prompts)

    def _sampler(self, name: str) -> Weights:
        if name not in self.table:
            raise UnknownError(f"unknown sampler {name!r}: create a sampling client")
        weights = self.table[name]
        if weights.saved is not None and not self.service.saved.is_current(weights.saved):
            raise UnknownError(
                f"the weights {weights.saved.path} of the sampler {name!r} were deleted or overwritten: create a new "
                "sampling client"
            )
        owner = name.partition(":kept:")[0]
        if (
            weights.kept is not None
            and owner in self.service.runs
            and weights.kept not in self.service.runs[owner].kept
        ):
            raise UnknownError(
                f"the weights of the sampler {name!r} were dropped: a run keeps its newest "
                f"{self.config.limits.samplers_of_run} unnamed ones (limits.samplers_of_run); save them under a name"
            )
        return weights
