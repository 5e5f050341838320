"""The decode loop: draft, verify, accept, commit, observe.

Every method of the catalogue runs through :func:`decode_round`; a method only says which drafter,
shape, acceptance rule and length controller take part. AR is the method that drafts nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline.acceptance.base import PathLogits
from paceline.constraints import Constraint
from paceline.drafters.base import Drafter, has_pseudo_tokens, reads_prompts
from paceline.models.base import PseudoTokens
from paceline.sampling import argmax_rows
from paceline.session import Session
from paceline.target import Target
from paceline.tree import clip, height, is_chain, subset
from paceline.types import (
    EMPTY_DRAFT,
    Acceptance,
    Budget,
    Draft,
    Load,
    Need,
    Outcome,
    Verification,
)

logger = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """A draft that was made elsewhere, and the seconds from asking for it until it was used."""

    draft: Draft
    seconds: float


def decode_round(
    sessions: Sequence[Session],
    drafters: Mapping[str, Drafter],
    target: Target,
    load: Load,
    *,
    arrived: Mapping[str, Arrived] | None = None,
    prefill: Sequence[tuple[Session, int]] = (),
) -> list[Outcome]:
    """One round for every given session, with a single target forward for all of them.

    Args:
        drafters: local drafters by name.
        arrived: drafts that were made elsewhere, by session id; those sessions skip step 1.
        prefill: prompt chunks of other sessions that ride along in the forward.

    Returns:
        One outcome for each session. Sessions, target and drafters are advanced accordingly.
    """
    # 1. Draft: each drafter proposes for all of its sessions at once.
    started = time.perf_counter()
    drafts = {session_id: draft for session_id, (draft, _) in (arrived or {}).items()}
    for name, members in _by_drafter(sessions, drafts).items():
        budgets = [round_budget(session, load) for session in members]
        proposed = propose_with(drafters[name], members, [budget.asked for budget in budgets])
        for session, budget, draft in zip(members, budgets, proposed, strict=True):
            if budget.shadow is not None:
                budget.shadow.draft, draft = draft, EMPTY_DRAFT
            drafts[session.session_id] = draft
    in_order = [_usable(drafts[s.session_id], s, target.vocab_size) for s in sessions]
    drafted = time.perf_counter()

    # 2. Verify: one forward over the last committed token and all nodes of every draft.
    wants = frozenset[Need]().union(
        *(s.plan.needs | s.length_controller.needs for s in (*sessions, *(s for s, _ in prefill)))
    )
    pseudo = [_pseudo(drafters, s, draft) for s, draft in zip(sessions, in_order, strict=True)]
    verifications = target.verify(sessions, in_order, wants, prefill, pseudo)
    for (session, _), read in zip(prefill, verifications[len(sessions) :], strict=True):
        _show_prompt(drafters, session, read)
    argmaxes = _argmaxes(sessions, verifications[: len(sessions)])
    verified = time.perf_counter()

    outcomes = []
    for session, draft, verification, tops in zip(
        sessions, in_order, verifications[: len(sessions)], argmaxes, strict=True
    ):
        # 3. Accept: the rule walks down the tree and adds the target's own next token; a target on
        #    another machine has done so already.
        verdict = verification.verdict
        if verdict is not None:
            draft, acceptance = verdict.draft, verdict.acceptance
        else:
            logits = PathLogits(
                verification.logits, session.params, session.token_ids, tops,
                session.prompt_length, session.constraint,
            )  # fmt: skip
            acceptance = session.plan.rule.accept(draft, logits)

        # 4. Commit: tokens to the session (a stop condition may cut them), KV to the cache.
        outcome = _commit(session, target, draft, verification, acceptance)
        outcomes.append(outcome)

        # 5. Observe: length controllers and drafters learn what became of the draft.
        waited = arrived and arrived.get(session.session_id)
        draft_s = waited.seconds if waited else drafted - started
        count_round(session, outcome, draft_s, verified - drafted)
        session.length_controller.observe(outcome, draft_s, verified - drafted)
    for name, members in _by_drafter(sessions, {}).items():
        if name in drafters:
            by_id = {s.session_id: o for s, o in zip(sessions, outcomes, strict=True)}
            observe_with(drafters[name], members, [by_id[s.session_id] for s in members])
    return outcomes


def round_budget(session: Session, load: Load) -> Budget:
    """What the length controller wants, within what the session may still generate."""
    budget = session.length_controller.budget(session, load)
    # One place is for the target's own token.
    return Budget(
        min(budget.depth, session.remaining - 1),
        budget.nodes if budget.depth else 0,
        budget.exit_layer,
        budget.shadow,
    )


def _by_drafter(
    sessions: Sequence[Session], without: Mapping[str, Draft]
) -> dict[str, list[Session]]:
    groups: dict[str, list[Session]] = {}
    for session in sessions:
        if session.session_id not in without:
            groups.setdefault(session.plan.method.drafter, []).append(session)
    return groups


def propose_with(
    drafter: Drafter, sessions: Sequence[Session], budgets: Sequence[Budget]
) -> list[Draft]:
    """The drafts, or empty ones when the drafter fails: a drafter never takes a session down."""
    try:
        drafts = drafter.propose(sessions, budgets)
        if len(drafts) != len(sessions):
            raise ValueError(f"{len(drafts)} drafts for {len(sessions)} sessions")
        return drafts
    except Exception:
        _lose(drafter, sessions)
        return [EMPTY_DRAFT] * len(sessions)


def observe_with(
    drafter: Drafter, sessions: Sequence[Session], outcomes: Sequence[Outcome]
) -> None:
    try:
        drafter.observe(sessions, outcomes)
    except Exception:
        _lose(drafter, sessions)


def _show_prompt(drafters: Mapping[str, Drafter], session: Session, read: Verification) -> None:
    """What the target computed for the next prompt tokens, to a drafter that wants it."""
    drafter = drafters.get(session.plan.method.drafter)
    if drafter is not None and reads_prompts(drafter):
        try:
            drafter.read_prompt(session, read)
        except Exception:
            _lose(drafter, [session])


def _pseudo(drafters: Mapping[str, Drafter], session: Session, draft: Draft) -> PseudoTokens | None:
    """What the session's drafter wants to have computed along with the draft."""
    drafter = drafters.get(session.plan.method.drafter)
    if drafter is None or not has_pseudo_tokens(drafter):
        return None
    try:
        return drafter.pseudo_tokens(session, draft)
    except Exception:
        _lose(drafter, [session])
        return None


def _lose(drafter: Drafter, sessions: Sequence[Session]) -> None:
    logger.exception("%s failed; its sessions go on as AR", type(drafter).__name__)
    for session in sessions:
        session.lose_drafter()
        try:
            drafter.close(session)
        except Exception:
            logger.exception("%s cannot close a session", type(drafter).__name__)


def _usable(draft: Draft, session: Session, vocab_size: int) -> Draft:
    """The draft within the session's bounds; an empty one if it cannot be verified.

    The forward serves all sessions, so a drafter that breaks its promises must not break it.
    """
    if not isinstance(draft, Draft) or not draft.is_sound(vocab_size):
        logger.warning("session %s: an impossible draft is dropped", session.session_id)
        return EMPTY_DRAFT
    if not draft.num_nodes:
        return draft
    if session.plan.rule.chain_only and not is_chain(draft.parent_indices):
        logger.warning("session %s: a tree for a chain-only rule is dropped", session.session_id)
        return EMPTY_DRAFT
    # One place is for the target's own token.
    draft = clip(draft, session.remaining - 1, session.plan.config.node_budget or 0)
    # A rule that corrects for q has to see what was drawn, even if it can only reject it.
    if session.constraint is not None and not session.plan.rule.draws.needs_q:
        draft = _permitted(draft, session.constraint)
    return draft


def _permitted(draft: Draft, constraint: Constraint) -> Draft:
    """The part of a draft that the constraint permits; verifying the rest would be for nothing."""
    tokens, parents = draft.token_ids.tolist(), draft.parent_indices.tolist()
    if is_chain(draft.parent_indices):
        keep = list(range(constraint.num_allowed(tokens)))
    else:
        keep = []
        paths: dict[int, list[int]] = {-1: []}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent in paths and constraint.num_allowed(path := [*paths[parent], token]) == len(
                path
            ):
                paths[node] = path
                keep.append(node)
    return draft if len(keep) == len(tokens) else subset(draft, np.asarray(keep, np.int64))


def _argmaxes(
    sessions: Sequence[Session], verifications: Sequence[Verification]
) -> list[list[int] | None]:
    """Argmax of all rows of a session, for those whose tokens are nothing else."""
    return [
        argmax_rows(verification.logits) if session.params.is_plain_argmax else None
        for session, verification in zip(sessions, verifications, strict=True)
    ]


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


def count_round(session: Session, outcome: Outcome, draft_s: float, verify_s: float) -> None:
    """Add a round to the statistics of its session."""
    stats, draft = session.stats, outcome.draft
    depth = height(draft.parent_indices)
    stats.num_rounds += 1
    stats.num_target_forwards += 1
    stats.num_draft_nodes += draft.num_nodes
    stats.num_drafted += depth
    stats.num_accepted += outcome.num_accepted
    stats.draft_seconds += draft_s
    stats.verify_seconds += verify_s
    if stats.first_token_at is None:
        stats.first_token_at = time.perf_counter()
    while len(stats.drafted_by_depth) < depth:
        stats.drafted_by_depth.append(0)
        stats.accepted_by_depth.append(0)
    for level in range(depth):
        stats.drafted_by_depth[level] += 1
        stats.accepted_by_depth[level] += level < outcome.num_accepted
