"""The `device` topology: the drafter on a client's machine, the target on a server.

:class:`DeviceClient` runs the engine and the loop of ``paceline`` with a target on a server
(``rpc/remote_target.py``), and chooses the fastest mode while it runs (``rpc/ladder.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter, at_once
from paceline.engine import Engine, RoundEvent
from paceline.errors import InvalidArgument
from paceline.knobs import Knobs
from paceline.methods import DRAFTER_PARTS, METHODS, Method
from paceline.plan import resolve
from paceline.request import Request
from paceline.rpc.ahead import MAX_IN_FLIGHT
from paceline.rpc.client import open_channel
from paceline.rpc.direct import ConnectDirect
from paceline.rpc.errors import ServerUnavailable
from paceline.rpc.fans import can_fan, draft_fans
from paceline.rpc.ladder import Ladder, Mode
from paceline.rpc.reconnect import Connect, Patience, RemoteCounters
from paceline.rpc.remote_target import RemoteTarget, TargetInfo, get_model
from paceline.rpc.states import StatesCodec
from paceline.sampling import SamplingParams
from paceline.session import Session, SessionStatistics
from paceline.tokenizer import Tokenizer, fingerprint
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome
from paceline.view import SessionView

LADDER = (Mode.DEVICE, Mode.SERVER, Mode.AR)
_LONGEST_COPY = 256  # tokens


class CopyAhead(Drafter):
    """Lets a drafter that copies go ahead, although it cannot take a guess back.

    This asks the drafter for more than a draft, and never shows it a guess: while all guesses are
    what it has found, the rounds ahead are the next tokens of the same copy.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._found: dict[str, tuple[int, list[int]]] = {}  # where a copy begins, and its tokens

    def open(self, session: SessionView) -> None:
        self._drafter.open(session)

    def close(self, session: SessionView) -> None:
        self._found.pop(session.session_id, None)
        self._drafter.close(session)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        wanted = [min(budget.depth, budget.nodes) for budget in budgets]
        asked = [Budget(_LONGEST_COPY, _LONGEST_COPY) if n > 0 else Budget(0, 0) for n in wanted]
        drafts = at_once(self._drafter.propose(sessions, asked))
        for i, (session, draft, count) in enumerate(zip(sessions, drafts, wanted, strict=True)):
            tokens = draft.token_ids.tolist()
            self._found[session.session_id] = session.length, tokens
            drafts[i] = Draft.chain(tokens[:count])
        return drafts

    def draft_ahead(self, session: SessionView, budget: Budget) -> Draft:
        """As :data:`paceline.rpc.ahead.DraftAhead`."""
        start, tokens = self._found.get(session.session_id, (session.length, []))
        done = session.length - start
        if session.token_ids[start:] != tokens[:done]:
            return EMPTY_DRAFT
        return Draft.chain(tokens[done : done + budget.depth])

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        self._drafter.observe(sessions, outcomes)


class DeviceDrafter(Drafter):
    """A drafter of a remote target: it does not draft again what has left ahead of its time.

    A head reads the states that have come with the answers.
    """

    def __init__(self, drafter: Drafter, target: RemoteTarget) -> None:
        self._drafter = drafter
        self._target = target
        self.needs = drafter.needs

    def check_knobs(self, knobs: Knobs) -> None:
        """As the drafter's own."""
        self._drafter.check_knobs(knobs)

    def open(self, session: SessionView) -> None:
        self._drafter.open(session)

    def close(self, session: SessionView) -> None:
        self._drafter.close(session)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [self._known(*asked) for asked in zip(sessions, budgets, strict=True)]
        asking = [i for i, draft in enumerate(drafts) if draft is None]
        if self._drafter.states is not None and self._drafter.needs:
            asking = [i for i in asking if self._target.read_states(sessions[i], self._drafter)]
        if asking:
            made = self._drafter.propose(
                [sessions[i] for i in asking], [budgets[i] for i in asking]
            )
            for i, draft in zip(asking, at_once(made), strict=True):
                drafts[i] = draft
        return [EMPTY_DRAFT if draft is None else draft for draft in drafts]

    def _known(self, session: SessionView, budget: Budget) -> Draft | None:
        if self._target.mode(session) is not Mode.DEVICE:
            return EMPTY_DRAFT  # the server does not ask for one
        sent = self._target.sent_ahead(session)
        return self._target.from_fan(session, budget) if sent is None else sent

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """Tell the drafter what became of drafts, except after it has drafted on guesses: then it
        looks at the tokens. A head gets the states instead."""
        if self._drafter.needs:
            return
        told = [
            (session, outcome)
            for session, outcome in zip(sessions, outcomes, strict=True)
            if self._target.mode(session) is Mode.DEVICE and not self._target.went_ahead(session)
        ]
        if told:
            self._drafter.observe([s for s, _ in told], [o for _, o in told])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRound:
    """What a round committed.

    Attributes:
        token_ids: the first ``num_accepted`` of them come from a draft, made here or by the server.
        text: that they complete.
        mode: in which they came.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    text: str
    mode: Mode
    finish_reason: str | None = None


@dataclass(slots=True)
class ModeChange:
    """A session went from one mode to another after ``num_tokens`` generated tokens."""

    num_tokens: int
    old: Mode
    new: Mode


@dataclass(slots=True)
class DeviceResult:
    """A whole generation on a device.

    Attributes:
        unverified_ids: tokens after ``token_ids`` that no target has verified, because no server
            came back in time.
        fingerprint: of the numerics of the server that committed the last token; empty: not known.
        numerics_changed: whether a server with other numerics went on in between.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    statistics: SessionStatistics = field(default_factory=SessionStatistics)
    counters: RemoteCounters = field(default_factory=RemoteCounters)
    mode_changes: list[ModeChange] = field(default_factory=list)
    unverified_ids: list[int] = field(default_factory=list)
    fingerprint: str = ""
    numerics_changed: bool = False


class DeviceClient:
    """Drafts here, verifies there. One generation at a time; not thread-safe.

    Args:
        servers: addresses HOST:PORT of servers with the same model; it uses the first that works.
        drafters: by name as in the catalogue; those that need a model.
        speculation: a method whose drafter needs tokens only, or is a head that reads states which
            the server sends, and its knobs.
        info: of the target; None asks the servers.
        tokenizer: the target's, for text and stop strings.
        connect: makes a channel to an address; the place for TLS and credentials.
        patience: when a server counts as lost.
        offline_ok: decode on with the drafter alone while no server answers.
        numerics_mismatch: when a server is lost, and those that answer have other numerics:
            "refuse" ends the generation with NumericsMismatch, "allow" goes on and says so.
        modes: allowed ways to get tokens, beginning with the first; without "server" where the
            target cannot run its default method.
        max_in_flight: rounds under way at a time.
        fans: draft for several verdicts while an answer travels, where there is time for it.
        states: how the server encodes its states for a head, one of
            :data:`paceline.rpc.states.ENCODINGS`.
        direct: makes a channel to a target past the gateway (``open_direct``), where gateways give
            tickets; None: all rounds go through the gateway.
        on_unverified: called while no server answers, each time that the drafter has decoded more
            alone: with all tokens after the committed ones. The rounds to come commit either these
            tokens or others in their place.

    Raises:
        InvalidArgument: the method cannot draft away from the target, or the tokenizer is not the
            target's.
        PacelineError: no server says what it serves.
    """

    def __init__(
        self,
        servers: Sequence[str],
        drafters: Mapping[str, Drafter] | None = None,
        *,
        speculation: SpeculationConfig | None = None,
        info: TargetInfo | None = None,
        tokenizer: Tokenizer | None = None,
        connect: Connect = open_channel,
        patience: Patience | None = None,
        offline_ok: bool = False,
        numerics_mismatch: str = "refuse",
        modes: Sequence[Mode] = LADDER,
        max_in_flight: int = MAX_IN_FLIGHT,
        fans: bool = True,
        states: str = "int8",
        direct: ConnectDirect | None = None,
        on_unverified: Callable[[Sequence[int]], None] = lambda token_ids: None,
        catalogue: Mapping[str, Method] = METHODS,
    ) -> None:
        if not modes or len(set(modes)) != len(modes):
            raise InvalidArgument("modes", modes, "at least one, each once")
        patience = patience or Patience()
        if info is None:
            info = TargetInfo.of(get_model(servers, connect, timeout=patience.give_up))
        if tokenizer and info.tokenizer and fingerprint(tokenizer) != info.tokenizer:
            raise InvalidArgument("tokenizer", "another one", f"that of the target {info.name!r}")
        self.info = info
        self.config = checked_speculation(speculation, catalogue)
        if not info.drafts:
            modes = [mode for mode in modes if mode is not Mode.SERVER]
            if not modes:
                raise InvalidArgument(
                    "modes", "server",
                    f"device or ar: the target's default method, {info.default_method!r}, is not "
                    "one that it can run",
                )  # fmt: skip
        self._ladder = Ladder(modes, clock=time.perf_counter, on_change=self._on_change)
        self._unverified: list[int] = []
        self._on_unverified = on_unverified
        self.target = RemoteTarget(
            servers, info,
            connect=connect,
            patience=patience,
            alone_ok=offline_ok,
            on_alone=self._on_alone,
            numerics_mismatch=numerics_mismatch,
            first_mode=modes[0],
            max_in_flight=max_in_flight,
            direct=direct,
        )  # fmt: skip
        self._engine = Engine(
            self.target, drafters,
            tokenizer=tokenizer,
            eos_token_ids=info.eos_token_ids,
            catalogue=catalogue,
        )  # fmt: skip
        name = resolve(self.config, catalogue).method.drafter
        if name != "none":
            own = self._engine.local_drafter(name)
            if own.needs and own.states is not None:
                self.target.states = StatesCodec(own.states, states)
            if own.rewinds:
                self.target.ahead.draft = lambda session, budget: at_once(
                    own.propose([session], [budget])
                )[0]
                if fans and can_fan(own):
                    self.target.ahead.fan = lambda session, draft: draft_fans(
                        own, [session], [draft]
                    )[0]
            elif own.drafts_on:
                self.target.ahead.draft, self.target.ahead.only_alone = own.draft_on, True
            elif own.copies:
                own = copier = CopyAhead(own)
                self.target.ahead.draft = copier.draft_ahead
            self._engine.drafters[name] = DeviceDrafter(own, self.target)
        if self.config.length == "pearl" and not self.target.goes_ahead:
            raise InvalidArgument(
                "length", "pearl", "another controller: nothing is drafted ahead here"
            )
        self.result = DeviceResult()

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, adapter: str = ""
    ) -> Iterator[DeviceRound]:
        """Generate; :attr:`result` grows with each round.

        Args:
            adapter: name of one of the target's; "" is none.

        Raises:
            InvalidArgument: as ``Engine.submit``, and what a server refused.
            ServerUnavailable: no server answered for too long, and the device may not go on alone.
        """
        result = self.result = DeviceResult(counters=self.target.counters)
        ladder = self._ladder
        ladder.begin()
        self.target.first_mode = ladder.mode  # the best one of the last generation
        self._unverified = []
        events: list[RoundEvent] = []
        engine = self._engine
        request = Request(prompt_ids, params or SamplingParams(), self.config, adapter=adapter)
        session = engine.submit(request, on_event=events.append)
        result.statistics = session.stats
        try:
            while not session.finished:
                engine.step()
                for event in events:
                    if event.outcome is None:
                        break  # the session failed
                    self._unverified = []
                    verdict = event.outcome.verification.verdict
                    assert verdict is not None  # of a remote target
                    result.fingerprint = verdict.fingerprint
                    result.numerics_changed = verdict.numerics_changed
                    yield self._round(event, session, ladder.mode)
                    if not event.finished:
                        mode = ladder.observe(len(event.token_ids), verdict.verify_seconds)
                        self.target.change_mode(session, mode)
                events.clear()
        finally:
            engine.cancel(session.session_id)
        if isinstance(session.error, ServerUnavailable) and self._unverified:
            result.unverified_ids = self._unverified
        elif session.error is not None:
            raise session.error

    def _round(self, event: RoundEvent, session: Session, mode: Mode) -> DeviceRound:
        self.result.token_ids, self.result.text = session.output_ids, session.text
        self.result.finish_reason = session.finish_reason
        return DeviceRound(
            token_ids=event.token_ids,
            num_accepted=event.num_accepted,
            text=event.text,
            mode=mode,
            finish_reason=session.finish_reason,
        )

    def _on_change(self, old: Mode, new: Mode) -> None:
        change = ModeChange(self.result.statistics.num_tokens, old, new)
        self.result.mode_changes.append(change)

    def _on_alone(self, session: SessionView, token_ids: list[int]) -> None:
        self._unverified = token_ids
        self._on_unverified(token_ids)

    def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, adapter: str = ""
    ) -> DeviceResult:
        """Generate and wait for the end."""
        for _ in self.generate(prompt_ids, params, adapter):
            pass
        return self.result

    def close(self) -> None:
        """Free what is still open on the server."""
        for session_id in list(self._engine.sessions):
            self._engine.cancel(session_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def checked_speculation(
    config: SpeculationConfig | None, catalogue: Mapping[str, Method] = METHODS
) -> SpeculationConfig:
    """A configuration that works away from the target.

    Raises:
        InvalidArgument: its drafter needs more of the target than tokens, or states that can be
            sent; servers do not verify clients' drafts with its rule; or its controller reads the
            target's states.
    """
    given = (config or SpeculationConfig(method="draft_model")).overrides()
    plan = resolve(SpeculationConfig(**given), catalogue)
    if plan.method.length == "goodput" and plan.config.num_speculative_tokens:
        # The controller that counts the way to the target and back.
        plan = resolve(SpeculationConfig(**{"length": "round_trip", **given}), catalogue)
    part = DRAFTER_PARTS.get(plan.method.drafter)
    if plan.needs and not (part is not None and part.reads_sent_states):
        raise InvalidArgument(
            "method", plan.method.name,
            "a method whose drafter needs tokens, or states that can be sent: this one's needs the "
            "target's "
            + ", ".join(sorted(need.value for need in plan.needs)),
        )  # fmt: skip
    if plan.rule.name not in ("coupled", "greedy"):
        raise InvalidArgument(
            "acceptance", plan.rule.name, "'coupled': the server verifies, with that rule"
        )
    controller = plan.new_length_controller()
    if controller.needs:
        raise InvalidArgument(
            "length", plan.config.length, "a controller that does not read the target's states"
        )
    return plan.config
