"""The transcripts of a verify session's two ends, without a network between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.rpc.errors import EpochFenced, PrefixDiverged, RoundOutOfOrder
from paceline.rpc.gen.paceline.v1 import verify_pb2
from paceline.rpc.messages import PrefixDigest
from paceline.rpc.transcript import ClientTranscript, ServerTranscript, VerifyTranscript
from paceline.tree import accepted_path
from paceline.types import EMPTY_DRAFT, Draft

PROMPT = [5, 6, 7]
TRUTH = [*PROMPT, *((3 * i * i + i) % 11 for i in range(200))]


class Target:
    """A server without an engine: its target writes ``TRUTH``."""

    def __init__(self, prompt: Sequence[int] = PROMPT) -> None:
        self.transcript = ServerTranscript("s", prompt)
        self.num_verified = 0

    def verify(self, request: verify_pb2.VerifyRequest) -> verify_pb2.VerifyResult:
        transcript = self.transcript
        if transcript.is_repeated(request.round):
            assert transcript.answer is not None
            return transcript.answer
        transcript.check_prefix(request)
        parents = request.parent_indices or range(-1, len(request.token_ids) - 1)
        draft = Draft(np.asarray(request.token_ids, np.int64), np.asarray(parents, np.int32))
        transcript.take(request.round, range(draft.num_nodes))
        self.num_verified += 1
        rest = TRUTH[transcript.length :]
        path = accepted_path(draft, rest)
        transcript.commit(rest[: len(path) + 1])
        return transcript.answered(path, rest[len(path)], verify_pb2.Timings())


def opened() -> tuple[ClientTranscript, Target]:
    client, target = ClientTranscript(PROMPT), Target()
    assert client.opened(target.transcript.opened()) == 0
    return client, target


def books(transcript: VerifyTranscript) -> tuple[object, ...]:
    return (
        transcript.session_id,
        transcript.epoch,
        transcript.round,
        transcript.token_ids,
        transcript.digest,
    )


def right(client: VerifyTranscript, count: int) -> Draft:
    return Draft.chain(TRUTH[client.length :][:count])


# --- rounds -------------------------------------------------------------------------------------


def test_both_ends_commit_the_same() -> None:
    client, target = opened()
    wrong = Draft.chain([TRUTH[8], 99])
    for draft, accepted in ((right(client, 3), 3), (EMPTY_DRAFT, 0), (wrong, 1)):
        verified = client.verified(target.verify(client.request(client.propose(draft))))
        assert len(verified.accepted_indices) == accepted
        assert books(client) == books(target.transcript)
        assert client.digest == PrefixDigest(client.token_ids).value()
    assert client.token_ids == TRUTH[: len(PROMPT) + 7]
    assert client.round == 3


def test_a_repeated_round_gets_the_recorded_answer() -> None:
    client, target = opened()
    request = client.request(client.propose(right(client, 2)))
    first = target.verify(request)
    assert target.verify(request) == first
    assert target.num_verified == 1
    client.verified(first)
    with pytest.raises(RoundOutOfOrder) as caught:
        target.transcript.is_repeated(3)
    assert caught.value.expected_round == 2
    assert not target.transcript.is_repeated(2)


def test_there_is_no_round_0_to_repeat() -> None:
    with pytest.raises(RoundOutOfOrder, match="expected 1"):
        Target().transcript.is_repeated(0)


def test_a_pending_round_can_be_repeated_and_must_be_answered_first() -> None:
    transcript = Target().transcript
    transcript.take(1, [])
    assert transcript.is_repeated(1)
    with pytest.raises(RoundOutOfOrder, match="no answer yet"):
        transcript.is_repeated(2)
    with pytest.raises(FailedPrecondition, match="no answer yet"):
        transcript.check_answered()
    transcript.failed()
    transcript.check_answered()
    assert not transcript.is_repeated(2)


@pytest.mark.parametrize("field", ["base_length", "prefix_digest"])
def test_a_draft_after_other_tokens_changes_nothing(field: str) -> None:
    client, target = opened()
    request = client.request(client.propose(right(client, 2)))
    setattr(request, field, 4 if field == "base_length" else bytes(16))
    before = books(target.transcript)
    with pytest.raises(PrefixDiverged) as caught:
        target.verify(request)
    assert (caught.value.committed_length, caught.value.digest) == (3, client.digest)
    assert books(target.transcript) == before


def test_an_answer_that_does_not_fit_changes_nothing() -> None:
    client, target = opened()
    result = target.verify(client.request(client.propose(right(client, 2))))
    before = books(client)
    other = verify_pb2.VerifyResult()
    other.CopyFrom(result)
    other.next_token += 1
    beyond = verify_pb2.VerifyResult()
    beyond.CopyFrom(result)
    beyond.accepted_indices.append(7)
    for bad in (other, beyond):
        with pytest.raises(PrefixDiverged):
            client.verified(bad)
        assert books(client) == before
    client.verified(result)
    assert books(client) == books(target.transcript)


def test_nodes_keep_the_indices_of_the_client() -> None:
    transcript = Target().transcript
    transcript.take(1, [0, 2, 5])
    transcript.commit([1, 2, 3])
    assert list(transcript.answered([0, 2], 3, verify_pb2.Timings()).accepted_indices) == [0, 5]


def test_a_node_that_the_draft_does_not_have_is_noticed() -> None:
    client, target = opened()
    result = target.verify(client.request(client.propose(right(client, 2))))
    result.accepted_indices[:] = [0, 2]
    with pytest.raises(PrefixDiverged, match=r"accepted_indices \(0, 2\) of 2 nodes"):
        client.verified(result)


def test_a_draft_without_a_guess_replaces_the_rounds_in_flight() -> None:
    client, target = opened()
    client.propose(Draft.chain([99]))
    client.propose(Draft.chain([98]), bonus=97)
    proposed = client.propose(right(client, 2))
    assert list(client.rounds) == [proposed]
    assert client.verified(target.verify(client.request(proposed))).accepted_indices == (0, 1)


def test_nothing_is_open_at_first() -> None:
    transcript = VerifyTranscript(PROMPT)
    assert (transcript.session_id, transcript.epoch, transcript.round) == ("", 0, 0)
    assert transcript.finish_reason is None
    client = ClientTranscript(PROMPT)
    assert (client.num_known, len(client.rounds), client.fingerprint) == (0, 0, "")
    assert (client.max_nodes, client.max_depth) == (0, 0)


def test_a_server_with_other_numerics_is_remembered() -> None:
    client = ClientTranscript(PROMPT)
    client.met(verify_pb2.OpenResult(fingerprint="a"))
    assert (client.fingerprint, client.numerics_changed) == ("a", False)
    client.met(verify_pb2.OpenResult(fingerprint="b", numerics_changed=True))
    client.met(verify_pb2.OpenResult())
    assert (client.fingerprint, client.numerics_changed) == ("b", True)


def test_truncate_forgets_the_rounds_in_flight() -> None:
    client, target = opened()
    client.verified(target.verify(client.request(client.propose(right(client, 2)))))
    client.propose(right(client, 2))
    client.truncated(target.transcript.truncated(4))
    assert not client.rounds
    assert books(client)[3:] == books(target.transcript)[3:]


@pytest.mark.parametrize("length", [2, 7])
def test_truncate_keeps_the_prompt_and_adds_nothing(length: int) -> None:
    client, target = opened()
    client.verified(target.verify(client.request(client.propose(right(client, 2)))))
    with pytest.raises(InvalidArgument) as caught:
        target.transcript.check_truncate(length)
    assert (caught.value.field, caught.value.value) == ("length", length)
    target.transcript.check_truncate(3)
    target.transcript.check_truncate(6)


def test_truncate() -> None:
    client, target = opened()
    client.verified(target.verify(client.request(client.propose(right(client, 4)))))
    for length in (2, 9):
        with pytest.raises(InvalidArgument, match=r"\[3, 8\]"):
            target.transcript.check_truncate(length)
    client.truncated(target.transcript.truncated(5))
    assert client.token_ids == TRUTH[:5]
    assert books(client) == books(target.transcript)


# --- resumes ------------------------------------------------------------------------------------


def test_a_resume_begins_an_epoch() -> None:
    client, target = opened()
    target.transcript.resume()
    with pytest.raises(EpochFenced):
        target.transcript.check_epoch(1)
    target.transcript.check_epoch(2)
    assert client.opened(target.transcript.opened()) == 0
    assert client.epoch == 2


def test_a_resume_finds_lost_answers() -> None:
    client, target = opened()
    rounds = [client.propose(right(client, 2))]
    for _ in range(3):
        done = client.length + len(client.guess)
        rounds.append(client.propose(Draft.chain(TRUTH[done + 1 : done + 3]), TRUTH[done]))
    for each in rounds[:3]:
        target.verify(client.request(each))  # and the answers are lost
    assert client.opened(target.transcript.opened()) == 3
    assert client.num_known == 2
    client.went_as_guessed()
    client.went_as_guessed()
    assert client.num_known == 0
    client.verified(target.verify(client.request(rounds[2])))
    assert books(client) == books(target.transcript)
    assert list(client.rounds) == rounds[3:]
    assert client.guess == TRUTH[client.length :][:2]


def test_a_wrong_guess_frees_the_numbers_of_the_rounds_behind_it() -> None:
    client, target = opened()
    first = client.propose(right(client, 2))
    client.request(first)
    ahead = client.request(client.propose(Draft.chain([1]), TRUTH[5] + 1))
    assert ahead.round == 2
    client.verified(target.verify(client.request(first)))
    assert not client.rounds
    with pytest.raises(PrefixDiverged):
        target.verify(ahead)
    assert client.request(client.propose(EMPTY_DRAFT)).round == 2


def test_a_resume_at_other_tokens_or_rounds_is_noticed() -> None:
    client, _ = opened()
    with pytest.raises(PrefixDiverged):
        client.opened(Target([*PROMPT, 1]).transcript.opened())
    client.propose(EMPTY_DRAFT)  # not sent
    result = Target().transcript.opened()
    result.next_round = 2
    with pytest.raises(RoundOutOfOrder):
        client.opened(result)


def test_a_session_opened_anew_counts_its_rounds_from_1() -> None:
    client, target = opened()
    for _ in range(2):
        client.verified(target.verify(client.request(client.propose(right(client, 2)))))
    lost = client.propose(right(client, 1))
    assert client.request(lost).round == 3
    other = Target(client.token_ids)
    client.reopen()
    assert client.request(lost).round == 1
    client.opened(other.transcript.opened())
    client.verified(other.verify(client.request(lost)))
    assert books(client) == books(other.transcript)


# What may happen, in any order: a round is proposed, ahead or not; frames and answers arrive or are
# lost with their connection; a round is sent twice; the session is resumed, or opened elsewhere.
EVENTS = (
    "right", "wrong", "ahead", "ahead wrong", "arrive", "arrive", "arrive", "answer", "answer",
    "repeat", "resume", "reopen",
)  # fmt: skip


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_interleaving_leaves_equal_transcripts(events: list[str]) -> None:
    run = Interleaving()
    for event in events:
        run.happen(event)
    run.resume()
    run.settle()
    assert books(run.client) == books(run.target.transcript)
    assert run.client.token_ids == TRUTH[: run.client.length]
    assert run.client.digest == PrefixDigest(run.client.token_ids).value()


class Interleaving:
    """A client, a target, and a stream that can break between them."""

    def __init__(self) -> None:
        self.client, self.target = opened()
        self.frames: list[verify_pb2.VerifyRequest] = []  # on their way
        self.answers: list[verify_pb2.VerifyResult | None] = []  # None: a refusal

    def happen(self, event: str) -> None:
        client = self.client
        if event in ("right", "wrong") and not client.rounds:
            tokens = right(client, 3).token_ids.tolist()
            if event == "wrong":
                tokens[1] += 1
            self.send(Draft.chain(tokens))
        elif event in ("ahead", "ahead wrong") and 0 < len(client.rounds) < 5:
            done = client.length + len(client.guess)
            bonus = TRUTH[done] + (event == "ahead wrong")
            self.send(Draft.chain(TRUTH[done + 1 : done + 3]), bonus)
        elif event == "arrive" and self.frames:
            self.arrive(self.frames.pop(0))
        elif event == "answer" and self.answers:
            self.answer(self.answers.pop(0))
        elif event == "repeat" and self.target.transcript.round:
            self.repeat()
        elif event == "resume":
            self.resume()
        elif event == "reopen":
            self.reopen()

    def send(self, draft: Draft, bonus: int | None = None) -> None:
        self.frames.append(self.client.request(self.client.propose(draft, bonus)))

    def arrive(self, frame: verify_pb2.VerifyRequest) -> None:
        try:
            self.answers.append(self.target.verify(frame))
        except (PrefixDiverged, RoundOutOfOrder):
            self.answers.append(None)

    def answer(self, answer: verify_pb2.VerifyResult | None) -> None:
        """Refusals are of rounds whose guess was wrong, which the client has forgotten."""
        if answer is not None:
            self.client.verified(answer)

    def repeat(self) -> None:
        """The last round arrives once more, from somewhere else."""
        before, transcript = self.target.num_verified, self.target.transcript
        again = self.target.verify(verify_pb2.VerifyRequest(round=transcript.round))
        assert again is transcript.answer
        assert self.target.num_verified == before

    def resume(self) -> None:
        """All that is on its way is lost; the rounds in flight are sent again."""
        self.target.transcript.resume()
        self.connect()
        while self.client.num_known:
            self.client.went_as_guessed()
        self.frames = [self.client.request(each) for each in self.client.rounds]

    def reopen(self) -> None:
        """The session is gone: a new one with the committed tokens, and the rounds behind Open."""
        self.target = Target(self.client.token_ids)
        self.client.reopen()
        self.frames = [self.client.request(each) for each in self.client.rounds]
        frames = self.frames
        self.connect()
        self.frames = frames

    def connect(self) -> None:
        self.frames, self.answers = [], []
        self.client.opened(self.target.transcript.opened())

    def settle(self) -> None:
        """Let everything arrive that is on its way."""
        while self.frames or self.answers:
            if self.frames:
                self.arrive(self.frames.pop(0))
            else:
                self.answer(self.answers.pop(0))


def test_a_round_behind_a_tree_follows_its_best_candidates() -> None:
    client = ClientTranscript([5, 6])
    tree = Draft(np.array([1, 2, 3, 4]), np.array([-1, -1, 0, 0], np.int32))
    assert client.propose(tree).path == (0, 2)
    assert client.guess == [1, 3]
    behind = client.propose(Draft.chain([8]), bonus=7)
    assert client.guess == [1, 3, 7, 8]
    assert behind.base == 2 + 2 + 1
    digest = PrefixDigest()
    digest.extend([5, 6, 1, 3, 7])
    assert behind.digest.value() == digest.value()
    assert client.propose(Draft.chain(())).path == ()
