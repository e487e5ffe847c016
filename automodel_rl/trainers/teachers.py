"""Teachers: models beside the student on the same ranks, or behind servers, and their log-probabilities of its rows."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import Batch
from automodel_rl.config.distillation import DistillLossConfig
from automodel_rl.config.further_models import TeacherConfig
from automodel_rl.errors import InputError
from automodel_rl.losses.distill import IDS, TEACHER
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.remote_teachers import open_remote_teacher

Answer = TypeVar("Answer")


class Teacher(Protocol):
    """A source of log-probabilities: a policy on the run's ranks, or a model behind a server."""

    vocab_size: int

    def on_device(self) -> AbstractContextManager[None]:
        """Makes the model ready to compute in the block."""
        ...

    def top_logprobs(self, batch: Batch, k: int, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """Same as `Policy.top_logprobs`."""
        ...

    def logprobs(self, batch: Batch, temperature: float = 1.0, *, ids: str | None = None) -> list[Tensor]:
        """Same as `Policy.logprobs`."""
        ...


class Teachers:
    """The teachers of a run. Each teaches the rows of its sources.

    Args:
        policies: the local models beside the student, by name.
        tokenizer: the student's tokenizer.

    Raises:
        InputError: a server does not answer, or has another tokenizer.
    """

    def __init__(
        self,
        configs: Mapping[str, TeacherConfig],
        policies: Mapping[str, Policy],
        tokenizer: PreTrainedTokenizerBase,
    ):
        self.configs = configs
        self.models: dict[str, Teacher] = {}
        with contextlib.ExitStack() as opened:
            for name, one in configs.items():
                if one.is_remote:
                    remote = open_remote_teacher(f"teachers.{name}", one, tokenizer)
                    opened.callback(remote.close)
                    self.models[name] = remote
                else:
                    self.models[name] = policies[name]
            self._open = opened.pop_all()

    def close(self) -> None:
        self._open.close()

    def check_sources(self, paths: Collection[str]) -> None:
        """Raises InputError if a teacher names a source that is not in `paths`, those of all sources of the run."""
        for name, config in self.configs.items():
            unknown = [path for path in config.sources if path not in paths]
            if unknown:
                raise InputError(
                    f"teachers.{name}.sources: {unknown[0]} is not the path of a source in data: correct it"
                )

    def begin(self) -> None:
        """Prepares the teachers. Must be called before they compute."""
        for name, teacher in self.models.items():
            if isinstance(teacher, Policy):
                teacher.begin()
                if self.configs[name].between == "host":
                    teacher.to_host()

    def of_source(self, path: str) -> str:
        """Returns the name of the teacher of a source. Raises InputError if there is none, or more than one."""
        named = [name for name, config in self.configs.items() if path in config.sources]
        found = named or [name for name, config in self.configs.items() if not config.sources]
        if len(found) == 1:
            return found[0]
        said = f"{' and '.join(found)} teach it" if found else "no teacher teaches it"
        raise InputError(
            f"teachers: for the source {path}, {said}: name each source in the sources of one teacher; one without "
            "sources teaches all others"
        )

    def fitted(self, loss: DistillLossConfig, student: Policy) -> DistillLossConfig:
        """Adapts a divergence's settings to these models: if all tokens are compared, there are none outside.
        Vocabulary sizes differ where one is padded."""
        sizes = [student.vocab_size, *(teacher.vocab_size for teacher in self.models.values())]
        if loss.top_k < min(sizes):
            return loss
        outside = "drop" if min(sizes) == max(sizes) else loss.outside
        return loss.model_copy(update={"top_k": min(sizes), "outside": outside})

    def compare(self, student: Policy, batch: Batch, names: Sequence[str], loss: DistillLossConfig) -> None:
        """Adds the tokens that a divergence compares to rows, and their teacher's log-probabilities of them. `names`
        has each row's teacher."""
        if loss.tokens_of == "teacher":
            tops = self._of_rows(
                batch, names, lambda teacher, rows: teacher.top_logprobs(rows, loss.top_k, loss.temperature)
            )
            batch[TEACHER], batch[IDS] = [top for top, _ in tops], [ids for _, ids in tops]
            self._leave_out_padding(student, batch)
            return
        batch[IDS] = [ids for _, ids in student.top_logprobs(batch, loss.top_k)]
        if loss.tokens_of == "both":
            tops = self._of_rows(batch, names, lambda teacher, rows: teacher.top_logprobs(rows, loss.top_k))
            batch[IDS] = [union(own, ids) for own, (_, ids) in zip(batch[IDS], tops, strict=True)]
        self._leave_out_padding(student, batch)
        batch[TEACHER] = self._of_rows(
            batch, names, lambda teacher, rows: teacher.logprobs(rows, loss.temperature, ids=IDS)
        )

    def _leave_out_padding(self, student: Policy, batch: Batch) -> None:
        """Excludes ids that only some of the models have: padding rows of a vocabulary, which are not tokens."""
        common = min(student.vocab_size, *(teacher.vocab_size for teacher in self.models.values()))
        batch[IDS] = [ids.masked_fill(ids >= common, -1) for ids in batch[IDS]]

    def logprobs(self, batch: Batch, names: Sequence[str], temperature: float) -> list[Tensor]:
        """Returns the log-probability of each token of each row under its teacher, [n]. `names` has each row's
        teacher; logits are divided by `temperature`."""
        return self._of_rows(batch, names, lambda teacher, rows: teacher.logprobs(rows, temperature))

    def _of_rows(
        self, batch: Batch, names: Sequence[str], ask: Callable[[Teacher, Batch], list[Answer]]
    ) -> list[Answer]:
        """Returns each row's answer by its teacher, in row order. Each teacher is called once."""
        found: dict[int, Answer] = {}
        for name, teacher in self.models.items():
            rows = [row for row, of_row in enumerate(names) if of_row == name]
            if not rows:
                continue
            with teacher.on_device():
                found |= zip(rows, ask(teacher, batch.rows(rows)), strict=True)
        return [found[row] for row in range(len(batch))]


def union(first: Tensor, second: Tensor) -> Tensor:
    """Joins two tensors of token ids [n, K] to int64 [n, 2 K], with -1 for ids of `second` that are also in `first`."""
    is_known = (second[:, :, None] == first[:, None, :]).any(2)
    return torch.cat([first, second.masked_fill(is_known, -1)], dim=1)
