"""A target on a server that the loop uses as any other: the `device` topology.

The loop drafts, calls :meth:`RemoteTarget.verify`, and gets a verdict. What the distance adds:

*Rounds ahead* (``rpc/ahead.py``). While an answer travels, the drafter goes on as if the target
would accept the whole draft and add what the drafter expects, and each further draft leaves at
once. The server takes the frames of a stream one after the other and compares each one's prefix
digest with its own tokens. So a wrong guess costs it a comparison, and a round whose guess was
right is already there when the answer to the round before leaves. A drafter takes part if it can
take a guess back (``Drafter.rewinds``), or find more than a draft at a time (``Drafter.copies``).
Others draft when the answer has come.

*Losing a server* (``rpc/reconnect.py``). Committed tokens are all that a target knows of a session,
and this side has them (``rpc/transcript.py``). ``rpc/target_link.py`` resumes a stream that breaks,
or opens the session anew with these tokens, there or at the next address, and sends the rounds in
flight again. Coupled sampling makes the continuation the same where numerics are the same: a
session that is opened anew names the fingerprint of its tokens, and a server with another one
refuses. When no server has it the session fails, or goes on and says so.

*Other ways to the same tokens.* ``Mode`` names them; a session may change between rounds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from paceline.drafters.base import Drafter
from paceline.errors import FailedPrecondition, InvalidArgument, PacelineError
from paceline.models.base import PseudoTokens
from paceline.numerics import check_mismatch
from paceline.rpc.ahead import MAX_IN_FLIGHT, AheadOptions
from paceline.rpc.client import open_channel
from paceline.rpc.direct import ConnectDirect, DirectOptions, DirectPath
from paceline.rpc.errors import ServerUnavailable, from_rpc_error
from paceline.rpc.gen.paceline.v1 import generate_pb2, generate_pb2_grpc
from paceline.rpc.ladder import Mode
from paceline.rpc.reconnect import TRANSIENT, Connect, Patience, RemoteCounters, TargetServers
from paceline.rpc.states import StatesCodec, StatesInbox
from paceline.rpc.target_link import TargetLink
from paceline.types import Budget, Draft, Need, Verification
from paceline.view import SessionView


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What the loop has to know about a remote target."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""
    default_method: str = ""
    tokenizer: str = ""  # its fingerprint (paceline.tokenizer); empty: not known
    fingerprint: str = ""  # of its numerics (paceline.numerics); empty: not known
    drafts: bool = True  # it can run its default method
    adapters: tuple[str, ...] = ()  # names

    @staticmethod
    def of(model: generate_pb2.Model) -> TargetInfo:
        return TargetInfo(
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=tuple(model.eos_token_ids),
            name=model.name,
            default_method=model.default_method,
            tokenizer=model.tokenizer,
            fingerprint=model.fingerprint,
            drafts=model.default_method in model.methods,
            adapters=tuple(model.adapters),
        )


class RemoteTarget:
    """A target on a server, for an engine on another machine. Not thread-safe, as its engine.

    Args:
        servers: addresses HOST:PORT; the target uses the first while it works.
        info: of the model that they serve.
        connect: makes a channel to an address; the place for TLS and credentials.
        patience: when a server counts as lost.
        alone_ok: while no server answers, the drafter decodes on alone.
        on_alone: called with a session and its tokens after the committed ones that no target has
            verified, whenever there are more of them.
        numerics_mismatch: when the servers that answer have other numerics than a session's tokens:
            "refuse" ends it with NumericsMismatch, "allow" goes on.
        first_mode: of new sessions.
        max_in_flight: rounds under way at a time; 1 waits for every answer.
        direct: makes a channel to a target past its gateway; None: rounds go through the gateway.

    Attributes:
        ahead: how its sessions draft ahead; ``ahead.draft`` is None: the drafter cannot.
        servers: what its sessions have learned of the servers, with all counters.
        direct: how its sessions go past gateways.
        states: which of the server's states its new sessions get; None: none.
    """

    num_layers = 0
    head_layers = 0.0
    kv_capacity = 2**31  # the server has its own limit, and says so

    def __init__(
        self,
        servers: Sequence[str],
        info: TargetInfo,
        *,
        connect: Connect = open_channel,
        patience: Patience | None = None,
        alone_ok: bool = False,
        on_alone: Callable[[SessionView, list[int]], None] = lambda session, tokens: None,
        numerics_mismatch: str = "refuse",
        first_mode: Mode = Mode.DEVICE,
        max_in_flight: int = MAX_IN_FLIGHT,
        direct: ConnectDirect | None = None,
    ) -> None:
        if not servers:
            raise InvalidArgument("servers", servers, "at least one HOST:PORT")
        if max_in_flight < 1:
            raise InvalidArgument("max_in_flight", max_in_flight, "an integer >= 1")
        self.info = info
        self.first_mode = first_mode
        self.servers = TargetServers(
            addresses=tuple(servers),
            connect=connect,
            patience=patience or Patience(),
            numerics_mismatch=check_mismatch(numerics_mismatch),
        )
        self.ahead = AheadOptions(
            vocab_size=info.vocab_size,
            max_in_flight=max_in_flight,
            alone_ok=alone_ok,
            on_alone=on_alone,
        )
        self.direct = DirectOptions(connect=direct)
        self.states: StatesCodec | None = None
        self._links: dict[str, TargetLink] = {}

    @property
    def counters(self) -> RemoteCounters:
        """Of everything that crossed the network."""
        return self.servers.counters

    @property
    def provides(self) -> frozenset[Need]:
        """What drafters may need: the states that the server sends."""
        return frozenset() if self.states is None else frozenset({self.states.layout.need})

    @property
    def goes_ahead(self) -> bool:
        """Whether drafts leave while answers travel."""
        ahead = self.ahead
        return ahead.draft is not None and ahead.max_in_flight > 1 and not ahead.only_alone

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def context_length(self) -> int:
        return self.info.context_length

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.info.adapters

    def open(self, session: SessionView) -> None:
        """Open the session on a server, without waiting for it."""
        path = DirectPath(self.direct, self.servers.connect, self.counters)
        states = None if self.states is None else StatesInbox(self.states)
        link = TargetLink(session, self.servers, self.ahead, self.first_mode, path, states)
        self._links[session.session_id] = link

    def close(self, session: SessionView) -> None:
        """Free the session on its server; one that is not open is ignored."""
        link = self._links.pop(session.session_id, None)
        if link is not None:
            link.close()

    def prefill_left(self, session: SessionView) -> int:
        """0: the server computes prompts by itself."""
        return 0

    def verify(
        self,
        sessions: Sequence[SessionView],
        drafts: Sequence[Draft],
        wants: frozenset[Need] = frozenset(),
        prefill: Sequence[tuple[SessionView, int]] = (),
        pseudo: Sequence[PseudoTokens | None] = (),
    ) -> list[Verification]:
        """Send all drafts, then wait for all verdicts; drafts ahead meanwhile.

        Raises:
            InvalidArgument: ``wants`` has more than states that the server sends, which
                :meth:`read_states` gives.
            ServerUnavailable: no server answers.
        """
        if wants - self.provides:
            names = ", ".join(sorted(need.value for need in wants - self.provides))
            raise InvalidArgument("wants", names, "nothing: the target is on another machine")
        links = [self._links[session.session_id] for session in sessions]
        for link, draft in zip(links, drafts, strict=True):
            link.submit(draft)
        nothing = torch.empty(0, self.vocab_size)
        return [Verification(nothing, verdict=link.wait()) for link in links]

    def commit(self, session: SessionView, path: Sequence[int]) -> None:
        """Nothing to do: the server has committed what its verdict says."""

    def truncate(self, session: SessionView, length: int) -> None:
        """Not possible: open a new session with the tokens that stay."""
        raise FailedPrecondition("a session of a remote target cannot be cut")

    def exit_logits(self, states: torch.Tensor) -> torch.Tensor:
        raise FailedPrecondition("a remote target has no states here")

    # --- beside the loop ------------------------------------------------------------------------

    def sent_ahead(self, session: SessionView) -> Draft | None:
        """The session's next draft, if it has left already."""
        rounds = self._links[session.session_id].transcript.rounds
        return rounds[0].draft if rounds else None

    def from_fan(self, session: SessionView, budget: Budget) -> Draft | None:
        """The session's next draft, if it was made before its verdict came."""
        return self._links[session.session_id].ahead.take(budget)

    def went_ahead(self, session: SessionView) -> bool:
        """Whether the drafter has drafted on guesses since its last proper draft."""
        return self._links[session.session_id].ahead.went_ahead

    def read_states(self, session: SessionView, drafter: Drafter) -> bool:
        """Let a drafter read the states that have come for a session since the last time.

        Returns:
            whether it has what a draft needs: after Open, a round has to bring the prompt's first.
        """
        states = self._links[session.session_id].states
        return states is not None and states.read_by(drafter, session)

    def mode(self, session: SessionView) -> Mode:
        """How the session gets its tokens."""
        return self._links[session.session_id].mode

    def change_mode(self, session: SessionView, mode: Mode) -> None:
        """Get the session's tokens in another way from its next round on."""
        self._links[session.session_id].change(mode)


def get_model(
    servers: Sequence[str], connect: Connect = open_channel, *, timeout: float
) -> generate_pb2.Model:
    """What the first server that answers serves.

    Args:
        timeout: seconds for all attempts together.

    Raises:
        PacelineError: the last error, when no server has answered in time.
    """
    end = time.monotonic() + timeout
    pause, error = 0.05, PacelineError("no server")
    while True:
        for address in servers:
            # A machine that is gone does not answer at all; another one may.
            share = max(0.1, min(end - time.monotonic(), max(2.0, timeout / len(servers))))
            channel = connect(address)
            try:
                stub: Any = generate_pb2_grpc.GenerateServiceStub(channel)
                return stub.GetModel(generate_pb2.GetModelRequest(), timeout=share)  # type: ignore[no-any-return]
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                if not isinstance(error, TRANSIENT):
                    raise error from None
                error = ServerUnavailable(f"{address}: {error}")
            finally:
                channel.close()
        pause = min(1.0, 2 * pause)
        if time.monotonic() + pause > end:
            raise error
        time.sleep(pause * random.uniform(0.5, 1.0))
