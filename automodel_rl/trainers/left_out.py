"""Counts of examples that are cut or dropped, as metrics, and a warning about the first."""

from collections.abc import Callable, Sequence

from automodel_rl.data.loader import LoadedStep


class LeftOut:
    """Counts examples that are too long or refused, and warns of the first of each kind.

    Attributes:
        held_out: the validation data's counts, as metrics.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.held_out: dict[str, int] = {}
        self._told: set[str] = set()

    def note_step(self, loaded: LoadedStep) -> dict[str, int]:
        counts = _counts([loaded])
        self._tell([loaded], counts, "in this step", "metrics.jsonl counts them in every step")
        return {f"data/{name}": count for name, count in counts.items()}

    def note_held_out(self, steps: Sequence[LoadedStep]) -> None:
        """Stores the counts of the validation data. `steps` are all of its loaded steps."""
        counts = _counts(steps)
        self._tell(steps, counts, "of the validation data", "val/ metrics cover the others")
        self.held_out = {f"val/{name}": count for name, count in counts.items()}

    def _tell(self, steps: Sequence[LoadedStep], counts: dict[str, int], which: str, end: str) -> None:
        too_long = next((step.too_long for step in steps if step.too_long), "")
        refused = next((step.refused for step in steps if step.refused), "")
        cut, dropped, bad = counts.values()
        if too_long and f"{which}, too long" not in self._told:
            self._told.add(f"{which}, too long")
            self.say(f"warning: {too_long}; {which}, {cut} examples were cut and {dropped} dropped; {end}")
        if refused and f"{which}, refused" not in self._told:
            self._told.add(f"{which}, refused")
            self.say(f"warning: {refused}: skipped; {which}, {bad} records were refused; {end}")


def _counts(steps: Sequence[LoadedStep]) -> dict[str, int]:
    return {
        "num_truncated": sum(step.num_truncated for step in steps),
        "num_dropped": sum(step.num_dropped for step in steps),
        "num_bad_records": sum(step.num_refused for step in steps),
    }
