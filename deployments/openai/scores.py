"""Prompts of one request that are only scored: those that begin alike are read as one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bounds import CONTINUATION_TOKENS, CONTINUATIONS
from paceline.rpc.gen.paceline.v1 import generate_pb2
from paceline.scoring import shared_beginnings

_KV_BESIDE = 2  # entries of a tree's session that are neither prompt nor tree


@dataclass(frozen=True, slots=True)
class Reading:
    """A request to the targets for some of an answer's prompts.

    Attributes:
        message: its continuations are the members' rests; it has none for a prompt as it came.
        members: which prompts.
    """

    message: generate_pb2.GenerateRequest
    members: tuple[int, ...]


def readings(
    messages: Sequence[generate_pb2.GenerateRequest], model: generate_pb2.Model
) -> list[Reading]:
    """Put prompts together, as far as one tree may go.

    Args:
        messages: for each prompt the request that scores it alone; they differ in the prompt only.
        model: whose limits count.
    """
    prompts = [list(message.token_ids.token_ids) for message in messages]
    sound = all(
        prompt and len(prompt) < model.context_length and max(prompt) < model.vocab_size
        and min(prompt) >= 0
        for prompt in prompts
    )  # fmt: skip
    # Texts, and what the targets refuse by the name that it has alone, go alone.
    if len(messages) == 1 or not sound:
        return [Reading(message, (i,)) for i, message in enumerate(messages)]
    found = []
    for group in shared_beginnings(
        prompts,
        most_members=CONTINUATIONS.most,
        most_tokens=CONTINUATION_TOKENS.most,
        most_positions=model.limits.kv_capacity - _KV_BESIDE,
    ):
        message = generate_pb2.GenerateRequest()
        message.CopyFrom(messages[group.members[0]])
        del message.token_ids.token_ids[group.length :]
        for member in group.members:
            message.continuations.add(token_ids=prompts[member][group.length :])
        found.append(Reading(message, group.members))
    return found
