"""Validates reports of workers and servers, which need not be trustworthy, and converts them to completions."""

from automodel_rl.generator_messages import RawCompletion
from automodel_rl.generators.protocol import Completion


def completion_of(written: RawCompletion) -> Completion:
    """Converts a report to a completion. It becomes an error if values are invalid, or if `finish` is neither "stop"
    nor "length", as after an abort in vLLM. A nan, infinite or positive log-probability is not an error: the token is
    not trained (`Branch.trained`)."""
    wrong = _what_is_wrong(written.token_ids, written.logprobs)
    if wrong is not None:
        return Completion([], [], "error", f"the generator's answer is invalid: {wrong}")
    versions = None if written.oldest is None or written.newest is None else (written.oldest, written.newest)
    match written.finish:
        case "stop" | "length" as finish:
            return Completion(
                written.token_ids,
                written.logprobs,
                finish,
                versions=versions,
                routes=written.routes,
                num_cached=written.num_cached,
            )
        case other:
            return Completion([], [], "error", f"the generator ended it: {other}")


def _what_is_wrong(token_ids: object, logprobs: object) -> str | None:
    if not isinstance(token_ids, list) or not isinstance(logprobs, list) or len(token_ids) != len(logprobs):
        return "token_ids and logprobs are not lists of equal length"
    if not all(type(token) is int and 0 <= token < 2**31 for token in token_ids):
        return "a token id is not a non-negative integer"
    if not all(type(score) in (int, float) for score in logprobs):
        return "a log-probability is not a number"
    return None
