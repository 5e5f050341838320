"""A request to an engine: the same value for all callers and all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.config import SpeculationConfig
from paceline.constraints import Constraint
from paceline.errors import InvalidArgument
from paceline.sampling import SamplingParams


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
        prediction: token ids of the expected output, for methods that draft them.
        committed: the output's first token ids, which another engine has committed; events report
            only the tokens after them.
        constraint: the constraint of ``params``, if the engine's compiler has made it already.
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
    prediction: Sequence[int] = ()
    committed: Sequence[int] = ()
    constraint: Constraint | None = None
    continuations: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise InvalidArgument("weight", self.weight, "a number above 0")
