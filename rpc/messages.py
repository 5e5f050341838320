"""Python values <-> messages of ``paceline.v1``, and the digest of committed tokens.

The Python classes hold the schema. Conversion goes by field name, so a new knob in a class and in
``common.proto`` needs no code here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from paceline import bounds
from paceline.config import MAX_NODES, SpeculationConfig, parse_speculation
from paceline.errors import InvalidArgument
from paceline.knobs import Knobs
from paceline.numerics import Fingerprint, check_mismatch, mismatch
from paceline.request import check_adapter
from paceline.rpc.gen.paceline.v1 import common_pb2, generate_pb2
from paceline.sampling import SamplingParams
from paceline.session import SessionStatistics
from paceline.types import EMPTY_DRAFT, Draft, DraftProbs

M = TypeVar("M", bound=Message)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
DIGEST_BYTES = 16


class PrefixDigest:
    """The prefix digest, which grows with the tokens: BLAKE2b-128 over little-endian 32-bit ids."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        self._hash.update(np.fromiter(token_ids, "<u4").tobytes())

    def copy(self) -> PrefixDigest:
        """A digest of the same tokens that grows on its own."""
        result = PrefixDigest()
        result._hash = self._hash.copy()
        return result

    def value(self) -> bytes:
        """The digest of everything so far; 16 bytes."""
        return self._hash.digest()


def build(message: type[M], prefix: str, **values: Any) -> M:
    """Make a message; protobuf's complaints become InvalidArgument.

    Raises:
        InvalidArgument: a value has the wrong type or does not fit its field.
    """
    try:
        return message(**values)
    except (ValueError, TypeError) as error:
        for name, value in values.items():
            try:
                message(**{name: value})
            except UnicodeEncodeError:
                what = "half of a surrogate pair"
                raise InvalidArgument(f"{prefix}{name}", what, "Unicode text") from None
            except (ValueError, TypeError):
                raise InvalidArgument(f"{prefix}{name}", value, f"what fits: {error}") from None
        raise


_LISTS = {"stop": bounds.STOP_STRINGS, "stop_token_ids": bounds.STOP_TOKEN_IDS,
          "logit_bias": bounds.LOGIT_BIASES}  # fmt: skip


def _given(message: Message, prefix: str) -> dict[str, Any]:
    """The fields that are set, as keyword arguments.

    Raises:
        InvalidArgument: an unknown field, or one with more entries than its bound.
    """
    entries: Any = UnknownFieldSet(message)
    unknown = [entry.field_number for entry in entries]
    if unknown:
        known = ", ".join(f.name for f in message.DESCRIPTOR.fields)
        raise InvalidArgument(
            f"{prefix}.<field {unknown[0]}>", "set", f"only fields that this server knows: {known}"
        )
    result: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        field = f"{prefix}.{descriptor.name}"
        if descriptor.is_repeated:
            _LISTS.get(descriptor.name, bounds.SPECULATION_LIST).check(len(value), field)
            entry = descriptor.message_type
            is_map = entry is not None and entry.GetOptions().map_entry
            result[descriptor.name] = dict(value) if is_map else tuple(value)
        else:
            result[descriptor.name] = value
    return result


def sampling_from_message(message: common_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters from the wire.

    Raises:
        InvalidArgument: a value is not allowed; names the field as ``sampling.<name>``.
    """
    try:
        return SamplingParams(**_given(message, "sampling"))
    except InvalidArgument as error:
        if error.field.startswith("sampling."):
            raise
        raise InvalidArgument(f"sampling.{error.field}", error.value, error.allowed) from None


def sampling_to_message(params: SamplingParams | None) -> common_pb2.SamplingParams:
    """Sampling parameters for the wire: what differs from the defaults."""
    values = (params or SamplingParams()).as_dict()
    return build(common_pb2.SamplingParams, "sampling.", **values)


def speculation_from_message(message: common_pb2.Speculation) -> SpeculationConfig:
    """How to speculate, from the wire.

    Raises:
        InvalidArgument: a value is not allowed; names the field as ``speculation.<name>``.
    """
    values = _given(message, "speculation")
    for name, value in values.items():
        if isinstance(value, str):
            bounds.SPECULATION_TEXT.check(len(value), f"speculation.{name}")
    return parse_speculation({name: _list_in(value) for name, value in values.items()})


def speculation_to_message(config: Knobs) -> common_pb2.Speculation:
    """How to speculate, for the wire.

    A knob that can be a text or a list has a string field, which holds a list as JSON.
    """
    fields = common_pb2.Speculation.DESCRIPTOR.fields_by_name
    values = {
        name: json.dumps(value)
        if isinstance(value, tuple) and not fields[name].is_repeated
        else value
        for name, value in config.overrides().items()
    }
    return build(common_pb2.Speculation, "speculation.", **values)


def _list_in(value: Any) -> Any:
    """The list that a string holds, or the value itself."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def draft_from_message(message: Any, vocab_size: int, *, max_nodes: int = MAX_NODES) -> Draft:
    """A checked draft from a message with ``token_ids``, ``parent_indices`` and ``probs``.

    Raises:
        InvalidArgument: see :meth:`paceline.types.Draft.checked`; or too many nodes.
    """
    count = len(message.token_ids)
    if count == 0 and len(message.parent_indices) == 0:
        return EMPTY_DRAFT
    if count > max_nodes:
        raise InvalidArgument("token_ids", f"{count} nodes", f"at most {max_nodes} nodes")
    given = len(message.parent_indices)
    if given > count:
        raise InvalidArgument(
            "parent_indices", f"{given} entries", f"one for each of {count} nodes"
        )
    probs = None
    if message.HasField("probs"):
        given = max(len(message.probs.token_ids), len(message.probs.probs))
        if len(message.probs.offsets) > count + 1 or given > count * vocab_size:
            raise InvalidArgument(
                "probs", f"{len(message.probs.offsets)} offsets and {given} tokens",
                f"{count + 1} offsets and at most {vocab_size} tokens for each node",
            )  # fmt: skip
        probs = DraftProbs(
            np.asarray(message.probs.offsets, np.int32),
            np.asarray(message.probs.token_ids, np.int64),
            np.asarray(message.probs.probs, np.float32),
        )
    parents: Sequence[int] = message.parent_indices or range(-1, count - 1)
    return Draft.checked(np.asarray(message.token_ids, np.int64), parents, vocab_size, probs)


def fill_draft(draft: Draft, message: Any) -> None:
    """Write a draft into a message with the three fields; a chain leaves the parents out."""
    message.token_ids.extend(draft.token_ids.tolist())
    parents = draft.parent_indices.tolist()
    if parents != list(range(-1, len(parents) - 1)):
        message.parent_indices.extend(parents)
    if draft.probs is not None:
        message.probs.offsets.extend(draft.probs.offsets.tolist())
        message.probs.token_ids.extend(draft.probs.token_ids.tolist())
        message.probs.probs.extend(draft.probs.probs.tolist())


def check_size(field: str, token_ids: Sequence[int], context_length: int) -> None:
    """Refuse more tokens than a context has before anything looks at them.

    Raises:
        InvalidArgument: names the field and both numbers.
    """
    if len(token_ids) > context_length:
        raise InvalidArgument(
            field,
            f"{len(token_ids)} tokens",
            f"at most as many as the context has, {context_length}",
        )


def continuations_of(request: generate_pb2.GenerateRequest) -> list[Sequence[int]]:
    """The continuations of a request, which may be any numbers.

    Raises:
        InvalidArgument: there are more than one request may have.
    """
    bounds.CONTINUATIONS.check(len(request.continuations))
    found: list[Sequence[int]] = [each.token_ids for each in request.continuations]
    bounds.CONTINUATION_TOKENS.check(sum(map(len, found)))
    return found


def tokens_from_message(field: str, token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Token ids from the wire.

    Raises:
        InvalidArgument: one is outside the vocabulary.
    """
    ids = list(token_ids)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        i, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidArgument(f"{field}[{i}]", bad, f"a token id in [0, {vocab_size})")
    return ids


# Moments are local to a process; they travel as seconds since the session's start.
MOMENTS = ("started_at", "admitted_at", "prefilled_at", "first_token_at", "finished_at")


def fingerprint_of(target: Any, adapter: str) -> Fingerprint:
    """Numerics of a target with one of its adapters; "" is none.

    Raises:
        InvalidArgument: the target has no such adapter.
    """
    if adapter:
        check_adapter(adapter, target.adapters)
    return target.fingerprint_of(adapter)  # type: ignore[no-any-return]


def numerics_differ(request: Any, own: Fingerprint, default: str) -> bool:
    """Whether a session goes on with other numerics than those of its tokens so far.

    Args:
        request: has ``fingerprint`` and ``numerics_mismatch``.
        own: of this replica, with the session's adapter.
        default: "refuse" or "allow", for a request that says neither.

    Raises:
        NumericsMismatch: the fingerprints differ, and the request does not allow it.
        InvalidArgument: one of the two fields makes no sense.
    """
    policy = check_mismatch(request.numerics_mismatch or default)
    if not request.fingerprint:
        return False
    given = Fingerprint.parse(request.fingerprint)
    if given == own:
        return False
    if policy == "allow":
        return True
    raise mismatch(
        "the tokens so far are of", given, own,
        "go on where the fingerprint is the same, run all replicas with `target.numerics: "
        "portable`, or ask with numerics_mismatch 'allow' if the rest may differ",
    )  # fmt: skip


def statistics_to_message(stats: SessionStatistics) -> common_pb2.Statistics:
    """Counters of a finished session for the wire."""
    message = common_pb2.Statistics()
    for descriptor in message.DESCRIPTOR.fields:
        name = descriptor.name
        if name in ("first_token_seconds", "total_seconds"):
            continue
        if descriptor.is_repeated:
            getattr(message, name).extend(getattr(stats, name))
        else:
            setattr(message, name, getattr(stats, name))
    if stats.first_token_at is not None:
        message.first_token_seconds = stats.first_token_at - stats.started_at
    if stats.finished_at is not None:
        message.total_seconds = stats.finished_at - stats.started_at
    return message


def statistics_from_message(message: common_pb2.Statistics) -> SessionStatistics:
    """Counters from the wire; moments count from 0, the session's start."""
    stats = SessionStatistics(started_at=0.0, finished_at=message.total_seconds)
    for descriptor in message.DESCRIPTOR.fields:
        name = descriptor.name
        if name in ("first_token_seconds", "total_seconds"):
            continue
        value = getattr(message, name)
        setattr(stats, name, list(value) if descriptor.is_repeated else value)
    if message.HasField("first_token_seconds"):
        stats.first_token_at = message.first_token_seconds
    return stats


def explanation_of(reply: generate_pb2.GenerateReply) -> dict[str, Any] | None:
    """What method ``auto`` chose and why, as :meth:`paceline.lengths.auto.Auto.explain` has it."""
    if not reply.HasField("explanation"):
        return None
    why = reply.explanation
    return {
        "workload": why.workload,
        "ar_rounds": why.ar_rounds,
        "ar_round_ms": why.ar_round_ms,
        "last": why.last,
        "drafters": {
            name: {
                "rounds": drafter.rounds,
                "accepted": drafter.accepted,
                "acceptance": list(drafter.acceptance),
                "promised_tokens_per_second": drafter.promised_tokens_per_second,
            }
            for name, drafter in sorted(why.drafters.items())
        },
    }
