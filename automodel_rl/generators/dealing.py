"""The dealing of requests to the members of a fleet."""

from collections.abc import Sequence

from automodel_rl.generator_messages import Request


def deal(requests: Sequence[Request], num_members: int) -> list[int]:
    """A member for each request, by its place among the members. All get equally many.

    Completions of one prompt are of similar length. So they go to different members, which then finish together. Where
    prompts are longer than what may be written after them, reading counts for more: then requests that stand next to
    each other, as those of one prompt do, go to one member, which has the prompt cached from the second on.

    Args:
        requests: the requests, without those of conversations that have a member already.
        num_members: number of members.
    """
    read = sum(len(request.prompt) for request in requests)
    written = sum(request.sampling.max_tokens for request in requests)
    if read > written:
        return [turn * num_members // len(requests) for turn in range(len(requests))]
    numbers = (turn if request.conversation is None else request.conversation for turn, request in enumerate(requests))
    return [number % num_members for number in numbers]
