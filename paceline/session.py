"""A session: one sequence with its tokens, sampling parameters, stop conditions and statistics."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidArgument
from paceline.lengths.base import depth_ahead
from paceline.sampling import SamplingParams, TokenLogprobs, token_logprobs
from paceline.tokenizer import IncrementalDecoder
from paceline.tree import height
from paceline.types import DepthPolicy, Draft, Draws, Need, Outcome, StopRule

if TYPE_CHECKING:
    import torch

    from paceline.acceptance.base import AcceptanceRule
    from paceline.constraints import Constraint
    from paceline.knobs import Knobs
    from paceline.lengths.base import LengthContext, LengthController
    from paceline.lengths.experience import RankRates
    from paceline.plan import Plan
    from paceline.shapes.base import Shape
    from paceline.tokenizer import Tokenizer


class SessionState(enum.Enum):
    """A session is always in exactly one of these states."""

    WAITING = "waiting"  # not admitted: no KV memory reserved
    PREFILLING = "prefilling"  # the target reads the prompt in chunks
    DRAFTING = "drafting"  # a drafter makes a draft, in this or another process
    READY = "ready"  # the next step can verify a draft
    VERIFYING = "verifying"
    FINISHED = "finished"


MAX_GAPS = 1024
"""How many gaps between outputs a session keeps until they are read."""


@dataclass(slots=True)
class SessionStatistics:
    """Raw counters of one session; properties derive the ratios.

    ``accepted_by_depth[i]`` counts accepted drafted tokens at depth ``i + 1``, and
    ``drafted_by_depth[i]`` the rounds whose draft reached that depth.
    """

    num_rounds: int = 0
    num_target_forwards: int = 0
    num_prefill_forwards: int = 0  # that read a part of the prompt
    num_drafted: int = 0  # along the deepest path of each draft, see acceptance_rate
    num_draft_nodes: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    drafter_failures: int = 0
    drafter_lost: bool = False
    states_bytes: int = 0  # of the target's states, sent to a drafter in another process
    started_at: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None
    prefilled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_depth: list[int] = field(default_factory=list)

    def count(self, outcome: Outcome, draft_s: float, verify_s: float) -> None:
        """Add a round."""
        draft = outcome.draft
        depth = height(draft.parent_indices)
        self.num_rounds += 1
        self.num_target_forwards += 1
        self.num_draft_nodes += draft.num_nodes
        self.num_drafted += depth
        self.num_accepted += outcome.num_accepted
        self.draft_seconds += draft_s
        self.verify_seconds += verify_s
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        while len(self.drafted_by_depth) < depth:
            self.drafted_by_depth.append(0)
            self.accepted_by_depth.append(0)
        for level in range(depth):
            self.drafted_by_depth[level] += 1
            self.accepted_by_depth[level] += level < outcome.num_accepted

    @property
    def mean_accepted_length(self) -> float:
        """Committed tokens per target forward, ``next_token`` included (also: block efficiency)."""
        return self.num_tokens / self.num_target_forwards if self.num_target_forwards else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens, counting one path of each draft (its depth)."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second from submission to the last token, prefill included."""
        end = self.finished_at if self.finished_at is not None else time.perf_counter()
        elapsed = end - self.started_at
        return self.num_tokens / elapsed if elapsed > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second after the first one: decoding alone."""
        if self.first_token_at is None or self.finished_at is None or self.num_tokens < 2:
            return 0.0
        elapsed = self.finished_at - self.first_token_at
        return (self.num_tokens - 1) / elapsed if elapsed > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived ratios, as the CLI prints them."""
        result = asdict(self)
        for name in asdict(self):
            if name.endswith("_at"):  # times that only this process's clock can read
                del result[name]
        result["mean_accepted_length"] = self.mean_accepted_length
        result["acceptance_rate"] = self.acceptance_rate
        result["tokens_per_second"] = self.tokens_per_second
        return result


class Session:
    """A sequence that an engine generates. One engine owns it; not thread-safe.

    Attributes:
        session_id: unique in the engine.
        token_ids: prompt plus everything committed, in order.
        prompt_length: number of prompt tokens at the start of ``token_ids``.
        plan: how drafts are made, accepted and sized for this session.
        rule: the plan's acceptance rule, with its weights if it has some.
        ranks: counts which of its drafter's candidates are taken; None: its tree follows no counts.
        prediction: tokens that the client expects as the output.
        constraint: the output's constraint, advanced past the committed tokens.
        stop_ids: the tokens that end the generation.
        prompt_logprobs: of the prompt tokens that are read, if the request wants them.
        branches: a tree that the target reads behind the prompt, instead of deciding what follows.
        num_known: first tokens of which its drafter needs no states of the target.
        method_name: the method that the session began with; losing the drafter changes the plan.
        traceparent: W3C trace context for a drafter in another process; "" is none.
        tenant: whose it is; it uses cached entries only of sessions of the same tenant.
        weight: of the tenant's share of the engine.
        priority: among the tenant's sessions, those with a lower number come first.
        adapter: name of the target's adapter that it decodes with; "" is none.
        teaches_drafter: see :class:`paceline.request.Request`.
        finish_reason: None while running; then "stop", "length", "cancelled" or "error".
        stop_cause: the stop string, or the one of ``stop_token_ids``, that ended it; else None.
    """

    def __init__(
        self,
        session_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        plan: Plan,
        *,
        eos_token_ids: Iterable[int] = (),
        max_length: int | None = None,
        tokenizer: Tokenizer | None = None,
        length_context: LengthContext | None = None,
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
        rule: AcceptanceRule | None = None,
    ) -> None:
        self.session_id = session_id
        self.token_ids: list[int] = list(prompt_ids)
        self.prompt_length = len(self.token_ids)
        self.params = params
        self.plan, self.rule = plan, rule or plan.rule
        self.ranks: RankRates | None = None
        self.method_name = plan.method.name
        self.traceparent = self.tenant = self.adapter = ""
        self.weight, self.priority = 1.0, 0
        self.prediction, self.constraint = tuple(prediction), constraint
        self.length_controller: LengthController = plan.new_length_controller(length_context)
        self.state = SessionState.WAITING
        self.stats = SessionStatistics()
        # Seconds between outputs, until CounterBook takes them, which not every process does.
        self.gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self._output_at: float | None = None
        self.finish_reason: str | None = None
        self.stop_cause: int | str | None = None
        self.error: Exception | None = None  # why finish_reason is "error"
        limit = self.prompt_length + params.max_tokens
        self.max_length = limit if max_length is None else min(limit, max_length)
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset((*params.stop_token_ids, *eos))
        self.prompt_logprobs: list[TokenLogprobs] = []
        if params.prompt_logprobs is not None:
            self.prompt_logprobs.append(TokenLogprobs(self.token_ids[0], None))
        self.branches: Draft | None = None
        self.num_known, self.teaches_drafter, self.client_needs = 0, False, frozenset[Need]()
        self._decoder = None
        if tokenizer is not None:
            self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens)
        self._text = ""
        self._longest_stop = max((len(s) for s in params.stop), default=0)

    def __repr__(self) -> str:
        return f"Session({self.session_id}, {self.length} tokens, {self.state.value})"

    def note_output(self) -> None:
        """Note the time of an output, which ends a gap after the one before."""
        now = time.perf_counter()
        if self._output_at is not None:
            self.gaps.append(now - self._output_at)
        self._output_at = now

    @property
    def length(self) -> int:
        """Number of committed tokens, prompt included."""
        return len(self.token_ids)

    @property
    def num_to_read(self) -> int:
        """Tokens to read before the first round: all but the last, or all and the branches."""
        return self.length - 1 if self.branches is None else self.length + self.branches.num_nodes

    # The members that the parts of a method read: see :class:`paceline.view.SessionView`.

    @property
    def drafter(self) -> str:
        return self.plan.method.drafter

    @property
    def config(self) -> Knobs:
        return self.plan.config

    @property
    def shape(self) -> Shape | None:
        return self.plan.shape

    @property
    def draws(self) -> Draws:
        return self.plan.rule.draws

    @property
    def chain_only(self) -> bool:
        return self.plan.rule.chain_only

    @property
    def stop_rule(self) -> StopRule | None:
        return self.length_controller.stop_rule

    @property
    def depth_ahead(self) -> int:
        return depth_ahead(self.length_controller, self.config.num_speculative_tokens or 0)

    @property
    def depth_policy(self) -> DepthPolicy | None:
        return self.plan.depth_policy

    @property
    def target_depth(self) -> DepthPolicy | None:
        return self.plan.target_depth

    @property
    def needs(self) -> frozenset[Need]:
        return self.plan.needs | self.client_needs

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.prompt_length :]

    @property
    def text(self) -> str:
        """The generated text, cut before a stop string; empty without a tokenizer."""
        return self._text

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - self.length

    @property
    def finished(self) -> bool:
        return self.state is SessionState.FINISHED

    def stops_at(self, token: int) -> bool:
        """Whether this token would end the generation."""
        return token in self.stop_ids

    def read_prompt(self, end: int, logits: torch.Tensor) -> None:
        """Note the log-probabilities of prompt tokens, if the request wants them.

        Args:
            end: number of tokens whose KV entries exist now; the rows of ``logits`` are of the last
                of them.  # [num_rows, vocab_size]
        """
        count, known = self.params.prompt_logprobs, self.prompt_logprobs
        if count is None:
            return
        for place, row in enumerate(logits, end - len(logits) + 1):
            if len(known) == place < self.prompt_length:  # else read before, or output
                values = row.float().cpu().numpy()
                known.append(token_logprobs(values, self.token_ids[place], count))

    def commit(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Append tokens one by one, as AR would, up to the first stop condition.

        Returns the tokens that it committed; sets ``finish_reason`` if one of them ends the
        generation.
        """
        committed = []
        for token in token_ids:
            self.token_ids.append(token)
            committed.append(token)
            if self.constraint is not None:
                self.constraint.commit(token)
            reason = self._stop_reason(token)
            if reason is not None:
                self.finish(reason)
                break
        self.stats.num_tokens += len(committed)
        return tuple(committed)

    def resume(self, token_ids: Sequence[int]) -> None:
        """Continue an output whose first tokens another engine has committed.

        Statistics count only what follows.

        Raises:
            InvalidArgument: the generation ends with these tokens, or before their end.
        """
        if len(self.commit(token_ids)) < len(token_ids) or self.finished:
            raise InvalidArgument(
                "committed_token_ids", f"{len(token_ids)} tokens",
                f"tokens after which the generation continues (it ends: {self.finish_reason})",
            )  # fmt: skip
        self.stats.num_tokens = 0

    def truncate(self, length: int) -> None:
        """Forget all tokens after the first ``length``, which must include the prompt."""
        output = self.token_ids[self.prompt_length : length]
        if self.constraint is not None:
            self.constraint.rewind(self.length - length)
        del self.token_ids[length:]
        if self._decoder is not None:
            self._decoder.reset()
            self._text = "".join(self._decoder.push(token) for token in output)

    def forced_ids(self, drafted: Sequence[int], count: int) -> list[int]:
        """See :class:`paceline.view.SessionView`."""
        if self.constraint is None or self.finished:
            return []
        return self.constraint.forced(self.output_ids, drafted, count)

    @property
    def streamable_length(self) -> int:
        """Number of characters of :attr:`text` that no stop string can still remove."""
        for size in range(min(self._longest_stop - 1, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(stop.startswith(tail) for stop in self.params.stop):
                return len(self._text) - size
        return len(self._text)

    def lose_drafter(self) -> None:
        """Continue as AR, because the drafter failed or cannot be reached; statistics record it."""
        from paceline.plan import AR_PLAN

        self.plan, self.rule = AR_PLAN, AR_PLAN.rule
        self.length_controller = AR_PLAN.new_length_controller()
        self.miss_draft()

    def miss_draft(self) -> None:
        """Record that a round goes without a draft because the drafter failed."""
        self.stats.drafter_failures += 1
        self.stats.drafter_lost = True

    def finish(self, reason: str) -> None:
        """End the session; later calls keep the first reason."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.stats.finished_at = time.perf_counter()
            if self._decoder is not None and reason != "stop":
                self._text += self._decoder.flush()
        self.state = SessionState.FINISHED

    def _stop_reason(self, token: int) -> str | None:
        if self.constraint is not None and self.constraint.error is not None:
            self.error = self.constraint.error
            return "error"
        keeps_stop = self.params.include_stop_str_in_output
        if token in self.stop_ids:
            self.stop_cause = token if token in self.params.stop_token_ids else None
            if self._decoder is not None:
                self._text += self._decoder.push(token) if keeps_stop else ""
                self._text += self._decoder.flush()
            return "stop"
        if self._decoder is not None:
            piece = self._decoder.push(token)
            if piece:
                known = len(self._text)
                self._text += piece
                cut = self._stop_string_from(known)
                if cut is not None:
                    self._text = self._text[:cut]
                    return "stop"
        if self.constraint is not None and self.constraint.complete:
            if self._decoder is not None:
                self._text += self._decoder.flush()
            return "stop"
        if self.length >= self.max_length:
            return "length"
        return None

    def _stop_string_from(self, known: int) -> int | None:
        """Where the text ends because of a stop string; None: there is none.

        Args:
            known: number of characters in which there is none.
        """
        if self.length - self.prompt_length <= self.params.min_tokens:
            return None
        places = ((self._text.find(s, max(0, known - len(s) + 1)), s) for s in self.params.stop)
        found = [(place, stop) for place, stop in places if place >= 0]
        if not found:
            return None
        place, stop = min(found)
        self.stop_cause = stop
        return place + len(stop) * self.params.include_stop_str_in_output
