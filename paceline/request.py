"""A request to an engine: the same value for all callers and all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.config import SpeculationConfig
from paceline.constraints import Constraint
from paceline.errors import InvalidArgument
from paceline.sampling import SamplingParams
from paceline.types import Need

MAX_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt_ids: the prompt's token ids.
        params: how tokens are chosen, and when to stop.
        speculation: method and knobs; None: the engine's default.
        session_id: unique in the engine; None: the engine makes one.
        traceparent: W3C trace context for drafters in other processes; "" is none.
        tenant: whose it is. Sessions share cached prefixes only with those of the same tenant,
            because the time that a prompt takes reveals what is cached; and tenants share the
            engine's time (:mod:`paceline.engine.fairness`).
        weight: of the tenant's share, in proportion to those of others.
        priority: among the requests of a tenant, those with a lower number come first.
        prediction: token ids of the expected output, for methods that draft them.
        committed: the output's first token ids, which another engine has committed; events report
            only the tokens after them.
        constraint: the constraint of ``params``, if the engine's compiler has made it already.
        adapter: name of one of the target's adapters; "" is the target as it is.
        teaches_drafter: the draft model may learn from the places where it is wrong in this
            session (:mod:`paceline.rejections`).
        needs: what a client that drafts reads of the target beyond committed tokens.
        continuations: sequences of token ids that may follow the prompt. The target reads all of
            them in one tree, and tells for each one its log-probabilities and the token after it;
            see :class:`paceline.engine.scores.ScoredTree`.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationConfig | None = None
    session_id: str | None = None
    traceparent: str = ""
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    prediction: Sequence[int] = ()
    committed: Sequence[int] = ()
    constraint: Constraint | None = None
    adapter: str = ""
    teaches_drafter: bool = False
    needs: frozenset[Need] = frozenset()
    continuations: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise InvalidArgument("weight", self.weight, "a number above 0")
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            allowed = f"an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}]"
            raise InvalidArgument("priority", self.priority, allowed)


def check_adapter(adapter: str, known: Sequence[str]) -> None:
    """Raise InvalidArgument unless ``adapter`` is one of those that a target has."""
    if adapter not in known:
        allowed = f"one of {', '.join(known)}, or none" if known else "none: the target has none"
        raise InvalidArgument("adapter", adapter, allowed)
