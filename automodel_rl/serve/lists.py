"""Lists and details of sessions, runs and saved weights."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from automodel_rl.errors import InputError
from automodel_rl.serve.requests import PageQuery, TtlBody, WeightsInfoBody
from automodel_rl.serve.saved_weights import Kind, Saved
from automodel_rl.serve.tables import UnknownError

if TYPE_CHECKING:
    from automodel_rl.serve.service import Service

Found = dict[str, str]
"""A request's path and query parameters."""

TYPES: dict[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}
"""The client's names for the kinds of saved weights."""


class Lists:
    """The lists of the server, newest first, with the names of Tinker's API."""

    def __init__(self, service: "Service"):
        self.service = service

    def sessions(self, found: Found) -> dict[str, Any]:
        names = sorted(self.service.sessions, key=lambda name: -self.service.sessions[name].created)
        page = PageQuery.of(found)
        return {"sessions": names[page.places], "cursor": page.cursor(len(names))}

    def session(self, found: Found) -> dict[str, Any]:
        name = found["name"]
        session = self.service.session(name)
        return {
            "training_run_ids": [run for run, one in self.service.runs.items() if one.session == name],
            "sampler_ids": [sampler for sampler in self.service.samplers.table if sampler.startswith(f"{name}:")],
            "user_metadata": _texts(session.user_metadata),
            "display_name": session.display_name,
        }

    def runs(self, found: Found) -> dict[str, Any]:
        """Lists runs since the server's start, and earlier ones with saved weights."""
        page = PageQuery.of(found)
        names = {*self.service.runs, *(saved.run for saved in self.service.saved.all)}
        runs = sorted((self.run({"name": name}) for name in names), key=lambda run: run["last_request_time"])
        return {"training_runs": runs[::-1][page.places], "cursor": page.cursor(len(runs))}

    def run(self, found: Found) -> dict[str, Any]:
        """Raises UnknownError if there is no such run."""
        name = found["name"]
        run = self.service.runs.get(name)
        newest = {kind: self.service.saved.newest(name, kind) for kind in TYPES}
        saved = max((one for one in newest.values() if one is not None), key=lambda one: one.created, default=None)
        known = run or saved
        if known is None:
            raise UnknownError(f"unknown training run {name!r}")
        used = run.used if run is not None else known.created  # type: ignore[union-attr]
        return {
            "training_run_id": name,
            "base_model": self.service.config.base_name,
            "model_owner": "local",
            "is_lora": known.shape.rank > 0,
            "lora_rank": known.shape.rank or None,
            "corrupted": run is not None and bool(run.lost),
            "last_request_time": _time(used),
            "last_checkpoint": _checkpoint(newest["weights"]),
            "last_sampler_checkpoint": _checkpoint(newest["sampler_weights"]),
            "user_metadata": _texts(known.user_metadata),
        }

    def weights(self, found: Found) -> dict[str, Any]:
        page = PageQuery.of({"limit": "100", **found})
        saved = sorted(self.service.saved.all, key=lambda one: -one.created)
        return {"checkpoints": [*map(_checkpoint, saved[page.places])], "cursor": page.cursor(len(saved))}

    def weights_of_run(self, found: Found) -> dict[str, Any]:
        self.run(found)
        saved = sorted(self.service.saved.all, key=lambda one: -one.created)
        return {"checkpoints": [_checkpoint(one) for one in saved if one.run == found["name"]]}

    def weights_info(self, body: WeightsInfoBody) -> dict[str, Any]:
        saved = self._saved(body.tinker_path)
        return {
            "base_model": self.service.config.base_name,
            "is_lora": saved.shape.rank > 0,
            "lora_rank": saved.shape.rank or None,
            "train_unembed": False,
            "train_mlp": saved.shape.mlp,
            "train_attn": saved.shape.attention,
        }

    def set_ttl(self, path: str, body: TtlBody) -> dict[str, Any]:
        """Sets when saved weights expire. Raises UnwritableError, without effect, if this cannot be written to disk."""
        self._saved(path)
        self.service.saved.set_ttl(path, body.ttl_seconds)
        return {}

    def _saved(self, path: str) -> Saved:
        try:
            return self.service.saved[path]
        except InputError as error:
            raise UnknownError(str(error)) from None


def _checkpoint(saved: Saved | None) -> dict[str, Any] | None:
    if saved is None:
        return None
    return {
        "checkpoint_id": f"{saved.kind}/{saved.path.rpartition('/')[2]}",
        "checkpoint_type": TYPES[saved.kind],
        "time": _time(saved.created),
        "tinker_path": saved.path,
        "size_bytes": saved.num_bytes,
        "public": False,
        "user_metadata": _texts(saved.user_metadata),
        "expires_at": None if saved.expires is None else _time(saved.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Converts metadata values to text, as the client expects."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
