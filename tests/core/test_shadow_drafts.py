"""Shadow drafts: while drafting does not pay, AR's own tokens tell when it would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits
from paceline.lengths.base import LengthContext
from paceline.profile import CostProfile
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import Budget, Draft, Need, Outcome
from tests.core.test_never_slower import MACHINES, Clock

PARAMS = SamplingParams(max_tokens=96, ignore_eos=True)
WRONG = 32  # tokens at the beginning that the drafter knows nothing of


class FromHereOn(Drafter):
    """Drafts nothing but wrong tokens at first, and AR's own ones later.

    Args:
        tokens: those of AR.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(self, tokens: Sequence[int], shadows: bool) -> None:
        self._tokens, self.shadows = tokens, shadows

    def open(self, session: Session) -> None: ...

    def close(self, session: Session) -> None: ...

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None: ...

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._draft(s, budget.depth) for s, budget in zip(sessions, budgets, strict=True)]

    def _draft(self, session: Session, depth: int) -> Draft:
        done = len(session.output_ids)
        right = list(self._tokens[done : done + depth])
        return Draft.chain(right if done >= WRONG else [(t + 1) % 4096 for t in right])


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("row", ["draft_model", "copyspec_draft_model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafting_resumes_soon_after_the_drafter_is_right_again(
    row: str, temperature: float, demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(MACHINES["avx2"], draft=0.02)
    runner = demo.local_target.runner
    prompt = [5, 17, 301, 42]
    params = replace(PARAMS, temperature=temperature, seed=3)

    def run(drafter: Any) -> tuple[Session, float]:
        with monkeypatch.context() as patch:
            clock = Clock(machine, patch)
            clock.charge(runner, machine.verify, prompts=False)
            profile: CostProfile = machine.profile()
            drafters = {"draft_model": drafter, "copyspec_or_draft_model": drafter}
            engine = Engine(
                ModelTarget(runner), drafters, limits=EngineLimits(prefix_cache=False),
                length_context=LengthContext(profile=profile, vocab_size=4096),
            )  # fmt: skip
            (session,) = engine.generate([prompt], params, SpeculationConfig(method=row))
            return session, clock.seconds

    (expected,) = Engine(ModelTarget(runner)).generate(
        [prompt], params, SpeculationConfig(method="ar")
    )
    seconds, resumed = {}, {}
    for shadows in (False, True):
        drafter = FromHereOn(expected.output_ids, shadows)
        session, seconds[shadows] = run(drafter)
        assert session.output_ids == expected.output_ids
        resumed[shadows] = session.stats.num_accepted
    ar = PARAMS.max_tokens * machine.verify(1.0)
    assert seconds[True] < 0.95 * ar  # though nearly half of it was hopeless
    assert seconds[True] < seconds[False]
    assert resumed[True] > resumed[False]


def test_rules_that_draw_from_q_make_none(demo: Engine) -> None:
    """There the tokens that AR commits do not tell whether a draft would have been accepted."""
    draft_model = demo.drafters["draft_model"]
    assert isinstance(draft_model, DraftModel)
    engine = Engine(ModelTarget(demo.local_target.runner), {"draft_model": draft_model})
    shares = {}
    for method in ("draft_model", "speculative_sampling", "ar"):
        session = engine.submit(Request([1, 2, 3], PARAMS, SpeculationConfig(method=method)))
        shares[method] = engine.length_context.shadow_share(session)
        engine.cancel(session.session_id)
    assert shares == {"draft_model": 1.0, "speculative_sampling": None, "ar": None}
