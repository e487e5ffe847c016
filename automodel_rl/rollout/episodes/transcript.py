"""Tokens of an episode, exactly as the generator read and wrote them."""

from collections.abc import Sequence

from automodel_rl.generators.protocol import Completion, KeptRoutes


class Transcript:
    """A prompt and the tokens after it.

    Attributes:
        token_ids: tokens after the prompt.
        logprobs: 0 where a token was not sampled.
        sampled: whether a token was sampled. Only those are trained.
        turns: completions.
        ends: number of tokens up to the end of each turn, with the prompt.
    """

    def __init__(self, prompt: Sequence[int]):
        self.prompt = list(prompt)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.sampled: list[bool] = []
        self.turns: list[Completion] = []
        self.ends: list[int] = []

    @property
    def prompt_ids(self) -> list[int]:
        return self.prompt + self.token_ids

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of its turns; None if unknown."""
        known = [turn.versions for turn in self.turns if turn.versions is not None]
        return (min(old for old, _ in known), max(new for _, new in known)) if known else None

    @property
    def num_routed(self) -> int:
        """Number of tokens whose routes its turns have. A turn's last token was sampled, but never computed."""
        return self.ends[-1] - 1 if self.ends else 0

    @property
    def routes(self) -> list[KeptRoutes] | None:
        """Routes of all tokens, as reported by the turn that sampled a token or read it first; None if routes are not
        kept."""
        pieces, start = [], 0
        for turn, end in zip(self.turns, self.ends, strict=True):
            if turn.routes is None:
                return None
            (kept,), stop = turn.routes, end if end == self.ends[-1] else end - 1
            pieces.append(kept.piece(start, stop))
            start = stop
        return pieces

    def add_turn(self, completion: Completion) -> None:
        self.turns.append(completion)
        self._add(completion.token_ids, completion.logprobs, is_sampled=True)
        self.ends.append(len(self.prompt) + len(self.token_ids))

    def add_suffix(self, token_ids: Sequence[int]) -> None:
        self._add(token_ids, [0.0] * len(token_ids), is_sampled=False)

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.sampled += [is_sampled] * len(token_ids)
