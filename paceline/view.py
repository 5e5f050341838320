"""What the parts of a method may read from a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.types import DepthPolicy, Draft, Draws, Need, StopRule

if TYPE_CHECKING:
    from paceline.knobs import Knobs
    from paceline.sampling import SamplingParams


class TokensView(Protocol):
    """What a draft model needs to know of the sequence that it continues.

    Attributes:
        session_id: unique in the engine.
        token_ids: prompt plus everything committed, in order.
    """

    session_id: str
    token_ids: list[int]

    @property
    def stop_rule(self) -> StopRule | None:
        """The length controller's rule for ending a draft early, if it has one."""
        ...


class SessionView(TokensView, Protocol):
    """A session as drafters, shapes, length controllers and targets see it.

    Attributes:
        prompt_length: number of prompt tokens at the start of ``token_ids``.
        max_length: number of tokens at which the generation ends.
        prediction: tokens that the client expects as the output.
        tenant: whose it is; it uses cached entries only of sessions of the same tenant.
        adapter: name of the target's adapter that it decodes with; "" is none.
        finish_reason: None while running.
        branches: a tree that the target reads behind the prompt, instead of deciding what follows.
        num_known: first tokens of which its drafter needs no states of the target.
    """

    prompt_length: int
    max_length: int
    params: SamplingParams
    prediction: tuple[int, ...]
    tenant: str
    adapter: str
    traceparent: str
    finish_reason: str | None
    branches: Draft | None
    num_known: int

    @property
    def length(self) -> int:
        """Number of committed tokens, prompt included."""
        ...

    @property
    def num_to_read(self) -> int:
        """Tokens to read before the first round: all but the last, or all and the branches."""
        ...

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        ...

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        ...

    @property
    def drafter(self) -> str:
        """Name of its drafter, as in the catalogue; "none" after the session lost it."""
        ...

    @property
    def config(self) -> Knobs:
        """Every knob of its method, filled in."""
        ...

    @property
    def shape(self) -> Any:
        """The tree shape (:class:`paceline.shapes.base.Shape`) of an expanding drafter, or None."""
        ...

    @property
    def draws(self) -> Draws:
        """How the acceptance rule wants the children of a node to be chosen."""
        ...

    @property
    def chain_only(self) -> bool:
        """Whether the acceptance rule verifies only chains."""
        ...

    @property
    def depth_ahead(self) -> int:
        """Depth of a draft that is made ahead, before the answer to the last draft has come."""
        ...

    @property
    def depth_policy(self) -> DepthPolicy | None:
        """Which of the target's layers compute a token; None unless the method has a policy."""
        ...

    @property
    def target_depth(self) -> DepthPolicy | None:
        """The policy if the target itself decodes with it, else None."""
        ...

    @property
    def needs(self) -> frozenset[Need]:
        """What all of its drafters together need from the target."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end the generation."""
        ...

    def forced_ids(self, drafted: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that the request's constraint leaves no choice about.

        They follow ``drafted``; [] without a constraint.
        """
        ...

    def stops_at(self, token: int) -> bool:
        """Whether this token would end the generation."""
        ...
