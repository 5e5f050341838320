"""The decode loop: draft, verify, accept, commit, observe.

Every method of the catalogue runs through :func:`decode_round`; a method only chooses the drafter,
shape, acceptance rule and length controller. AR is the method that drafts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.acceptance.base import PathLogits
from paceline.engine.ahead import DraftingAhead
from paceline.sampling import argmax_rows
from paceline.session import Session
from paceline.target import Target
from paceline.types import Acceptance, Draft, Load, Need, Outcome, Verification


def decode_round(
    sessions: Sequence[Session],
    drafting: DraftingAhead,
    target: Target,
    load: Load,
    *,
    prefill: Sequence[tuple[Session, int]] = (),
) -> list[Outcome]:
    """One round for every given session, with a single target forward for all of them.

    Args:
        prefill: prompt chunks of other sessions, computed in the same forward.

    Returns:
        One outcome for each session. Sessions, target and drafters have advanced accordingly.
    """
    # 1. Draft: each drafter proposes for all of its sessions at once.
    collected = drafting.collect(sessions, load)
    drafts = [draft for draft, _ in collected]
    drafted_at = time.perf_counter()

    # 2. Verify: one forward over the last committed token and all nodes of every draft.
    wants = frozenset[Need]().union(
        *(s.rule.needs for s in sessions),
        *(s.needs | s.length_controller.needs for s in (*sessions, *(s for s, _ in prefill))),
    )
    pseudo = drafting.pseudo_tokens(sessions, drafts)
    with drafting.ahead(sessions, drafts):  # some drafters draft on meanwhile
        found = target.verify(sessions, drafts, wants, prefill, pseudo)
    verifications, reads = found[: len(sessions)], found[len(sessions) :]
    for (session, _), read in zip(prefill, reads, strict=True):
        drafting.read_prompt(session, read)
        session.read_prompt(session.num_to_read - target.prefill_left(session), read.logits)
        session.stats.num_prefill_forwards += 1
    argmaxes = [_argmaxes(s, v) for s, v in zip(sessions, verifications, strict=True)]
    verify_s = time.perf_counter() - drafted_at

    outcomes = []
    for session, (draft, draft_s), verification, tops in zip(
        sessions, collected, verifications, argmaxes, strict=True
    ):
        # 3. Accept: the rule walks down the tree and adds the target's own next token. A target on
        #    another machine has already done so.
        verdict = verification.verdict
        if verdict is not None:
            draft, acceptance = verdict.draft, verdict.acceptance
        else:
            logits = PathLogits(
                verification.logits, session.params, session.token_ids, tops,
                session.prompt_length, session.constraint, session.stop_ids,
                verification.extras.get(Need.HIDDEN_STATES),
            )  # fmt: skip
            acceptance = session.rule.accept(draft, logits)

        # 4. Commit: tokens to the session (a stop condition may cut them), KV to the cache.
        outcome = _commit(session, target, draft, verification, acceptance)
        outcomes.append(outcome)

        # 5. Observe: length controllers and drafters learn what became of the draft.
        session.stats.count(outcome, draft_s, verify_s)
        session.note_output()
        session.length_controller.observe(outcome, draft_s, verify_s)
        if session.ranks is not None:
            session.ranks.observe(draft, acceptance.path)
    drafting.observe(sessions, outcomes)
    return outcomes


def _argmaxes(session: Session, verification: Verification) -> list[int] | None:
    """Argmax of each row of logits; None unless the session's tokens are plain argmaxes."""
    return argmax_rows(verification.logits) if session.params.is_plain_argmax else None


def _commit(
    session: Session,
    target: Target,
    draft: Draft,
    verification: Verification,
    acceptance: Acceptance,
) -> Outcome:
    path = acceptance.path
    accepted = [int(draft.token_ids[node]) for node in path]
    committed = session.commit([*accepted, acceptance.next_token])
    num_accepted = min(len(committed), len(path))
    # The last committed token never has a KV entry; a stop inside the draft shortens the path.
    target.commit(session, path[: len(committed) - 1])
    return Outcome(
        draft=draft,
        path=path,
        next_token=acceptance.next_token,
        token_ids=committed,
        num_accepted=num_accepted,
        verification=verification,
        finish_reason=session.finish_reason,
    )
