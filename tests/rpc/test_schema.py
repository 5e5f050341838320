"""The protos carry Paceline's own schema, and the stubs are what the protos give."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.methods import METHODS
from paceline.plan import resolve
from paceline.rpc.gen.paceline.v1 import common_pb2, verify_pb2
from paceline.rpc.generate import stale
from paceline.rpc.messages import (
    MOMENTS,
    PrefixDigest,
    draft_from_message,
    fill_draft,
    sampling_from_message,
    sampling_to_message,
    speculation_from_message,
    speculation_to_message,
    statistics_from_message,
    statistics_to_message,
)
from paceline.sampling import SamplingParams
from paceline.session import SessionStatistics
from paceline.types import Draft, DraftProbs


def _names(message: type) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def test_stubs_are_up_to_date() -> None:
    assert stale() == []


def test_sampling_params_have_the_same_fields() -> None:
    assert _names(common_pb2.SamplingParams) == {f.name for f in fields(SamplingParams)}


def test_speculation_has_the_same_fields() -> None:
    assert _names(common_pb2.Speculation) == set(SpeculationConfig.model_fields)


def test_single_values_say_whether_they_were_set() -> None:
    for message in (common_pb2.SamplingParams, common_pb2.Speculation):
        for field in message.DESCRIPTOR.fields:
            assert field.is_repeated or field.has_presence, field.full_name


def test_statistics_have_the_same_fields() -> None:
    moments = {"first_token_seconds", "total_seconds"}  # seconds since started_at instead
    counters = {f.name for f in fields(SessionStatistics)} - set(MOMENTS)
    assert _names(common_pb2.Statistics) == counters | moments


def test_draft_probs_have_the_same_fields() -> None:
    assert _names(common_pb2.DraftProbs) == {f.name for f in fields(DraftProbs)}
    draft = {f.name for f in fields(Draft)}
    assert _names(common_pb2.Draft) == draft
    assert draft <= _names(verify_pb2.VerifyRequest)


def test_sampling_round_trip() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
        logit_bias={5: -2.5, 9: 1e6}, stop=("\n\n", "ω"), stop_token_ids=(3, 4), seed=2**63 - 1,
        max_tokens=7, ignore_eos=True, allowed_token_ids=(5, 6), min_tokens=3,
        skip_special_tokens=False, include_stop_str_in_output=True, prompt_logprobs=0,
    )  # fmt: skip
    assert sampling_from_message(sampling_to_message(params)) == params
    assert sampling_from_message(common_pb2.SamplingParams()) == SamplingParams()


def test_speculation_round_trip_for_every_method() -> None:
    """What a target sends to its drafter, a plan's filled-in config, means the same there."""
    for name in METHODS:
        config = resolve(SpeculationConfig(method=name, allow_lossy=True)).config
        message = speculation_to_message(config)
        assert speculation_from_message(message) == config
        assert resolve(speculation_from_message(message)).config == config


def test_unset_is_not_zero() -> None:
    message = common_pb2.Speculation(num_speculative_tokens=0)
    assert speculation_from_message(message).num_speculative_tokens == 0
    assert speculation_from_message(common_pb2.Speculation()).num_speculative_tokens is None


def test_fields_from_the_future_are_refused() -> None:
    unknown = bytes([0xF8, 0x06, 0x01])  # field 111, varint 1
    with pytest.raises(InvalidArgument, match="field 111"):
        sampling_from_message(common_pb2.SamplingParams.FromString(unknown))
    with pytest.raises(InvalidArgument, match="field 111"):
        speculation_from_message(common_pb2.Speculation.FromString(unknown))


def test_statistics_round_trip() -> None:
    stats = SessionStatistics(
        num_rounds=3, num_target_forwards=3, num_drafted=9, num_draft_nodes=12, num_accepted=5,
        num_tokens=8, draft_seconds=0.25, verify_seconds=0.5, drafter_failures=1,
        drafter_lost=True, started_at=100.0, first_token_at=100.5, finished_at=104.0,
        accepted_by_depth=[3, 2], drafted_by_depth=[3, 3],
    )  # fmt: skip
    back = statistics_from_message(statistics_to_message(stats))
    assert back.as_dict() == stats.as_dict()
    assert back.decode_tokens_per_second == stats.decode_tokens_per_second == 2.0


TREES = st.lists(st.integers(0, 299), max_size=24).flatmap(
    lambda ids: st.tuples(
        st.just(ids),
        st.tuples(*(st.integers(-1, i - 1) for i in range(len(ids)))).map(list),
    )
)


@given(TREES)
def test_draft_round_trip(tree: tuple[list[int], list[int]]) -> None:
    draft = Draft.checked(tree[0], tree[1], 300)
    message = common_pb2.Draft()
    fill_draft(draft, message)
    wire = common_pb2.Draft.FromString(message.SerializeToString())
    back = draft_from_message(wire, 300)
    assert back.token_ids.tolist() == tree[0]
    assert back.parent_indices.tolist() == tree[1]


def test_probs_round_trip() -> None:
    row = (np.asarray([4, 7], np.int64), np.asarray([0.25, 0.75], np.float32))
    draft = Draft.chain([7, 4], DraftProbs.stack([row, row]))
    message = common_pb2.Draft()
    fill_draft(draft, message)
    back = draft_from_message(message, 10)
    assert back.probs is not None
    assert back.probs.offsets.tolist() == [0, 2, 4]
    assert back.probs.row(1)[0].tolist() == [4, 7]
    assert back.probs.row(1)[1].tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"token_ids": [300]}, "token_ids[0]"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": [1, 2], "parent_indices": [-1, 1]}, "parent_indices[1]"),
        ({"token_ids": [1, 2], "parent_indices": [-1]}, "parent_indices"),
        ({"token_ids": [], "parent_indices": [-1]}, "parent_indices"),
        ({"token_ids": [1] * 257}, "token_ids"),
        ({"token_ids": [1], "probs": common_pb2.DraftProbs(offsets=[0])}, "probs.offsets"),
    ],
)
def test_bad_drafts(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        draft_from_message(common_pb2.Draft(**values), 300)  # type: ignore[arg-type]
    assert caught.value.field == field


@given(st.lists(st.integers(0, 2**31 - 1)), st.integers(0, 50))
def test_digest(token_ids: list[int], cut: int) -> None:
    """The digest is what its description says, however the tokens came."""
    data = struct.pack(f"<{len(token_ids)}I", *token_ids)
    expected = hashlib.blake2b(data, digest_size=16).digest()
    grown = PrefixDigest(token_ids[:cut])
    grown.value()
    grown.extend(token_ids[cut:])
    assert grown.value() == expected
    assert PrefixDigest([*token_ids, 1]).value() != expected


@pytest.mark.parametrize("vocab_size", [6_144, 256_000])
def test_a_round_is_below_one_kilobyte(vocab_size: int) -> None:
    """16 nodes, a long context, large token ids: both directions together, and no mask."""
    random = np.random.default_rng(0)
    parents = [int(random.integers(-1, i)) if i else -1 for i in range(16)]
    draft = Draft.checked(random.integers(vocab_size // 2, vocab_size, 16), parents, vocab_size)
    request = verify_pb2.VerifyRequest(
        round=10_000, base_length=1_000_000, prefix_digest=PrefixDigest(range(99)).value()
    )
    fill_draft(draft, request)
    result = verify_pb2.VerifyResult(
        round=10_000,
        accepted_indices=range(16),
        next_token=vocab_size - 1,
        committed_length=1_000_017,
        digest=PrefixDigest(range(99)).value(),
        finish_reason="length",
        timings=verify_pb2.Timings(verify_seconds=1.0, total_seconds=1.0),
    )
    frame = verify_pb2.VerifyFrame(verify=request)
    reply = verify_pb2.VerifyReply(verify=result)
    assert frame.ByteSize() < 128
    assert reply.ByteSize() < 128
