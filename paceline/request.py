"""What an engine is asked for: one value for all callers and all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.config import SpeculationConfig
from paceline.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt_ids: the prompt's token ids.
        params: how tokens are chosen, and when to stop.
        speculation: method and knobs; None: the engine's own.
        session_id: unique in the engine; None: the engine makes one.
        traceparent: W3C trace context for drafters elsewhere; "" is none.
        cache_scope: whose cached prefixes the session may begin with, and adds to: how long a
            prompt takes tells what is cached.
        prediction: token ids that the output is expected to have, for methods that draft them.
        committed: the output's first token ids, from another engine; events tell of what comes
            after them.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationConfig | None = None
    session_id: str | None = None
    traceparent: str = ""
    cache_scope: str = ""
    prediction: Sequence[int] = ()
    committed: Sequence[int] = ()
