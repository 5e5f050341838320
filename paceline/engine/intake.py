"""Turns requests into sessions, after checking everything that may be wrong with a request."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.admission import most_entries
from paceline.bounds import CONTINUATION_TOKENS, CONTINUATIONS
from paceline.config import SpeculationConfig
from paceline.constraints import ConstraintCompiler
from paceline.drafters.base import DRAFTERS
from paceline.engine.drafting import DrafterSet
from paceline.engine.scores import ScoredTree
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.lengths.auto import workload_of
from paceline.lengths.base import LengthContext
from paceline.lengths.experience import CROWD, RankRates, experience_of
from paceline.methods import ACCEPTANCE_RULES, AUTO_CHOICES, Method
from paceline.plan import AR_PLAN, Plan, resolve, trained_rule
from paceline.request import Request, check_adapter
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget, Target, num_cached, why_lacking
from paceline.tokenizer import Tokenizer

LONGEST_READ = 256
"""Tokens of a prompt that a head of method ``auto`` reads at most."""
MOST_AGAIN, AGAIN_SHARE, MOST_AGAIN_OF_LONG = 16, 0.5, 64
"""Tokens at most that the target has in its prefix cache and computes again for a head: the first
number, or a share of ``max_tokens`` up to the last. A token in a forward of several costs an eighth
of a round or less, and a head saves more than a sixteenth. In a batch it saves too little."""
MOST_PLANS = 64
"""Resolved configs that are kept."""


class Intake:
    """Checks requests against a target, its drafters and a catalogue, and makes their sessions.

    Args:
        check_queue: refuses a request of this tenant, priority and tokens if the queue is full.
    """

    def __init__(
        self,
        target: Target,
        drafters: DrafterSet,
        catalogue: Mapping[str, Method],
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: Iterable[int],
        check_queue: Callable[[str, int, Sequence[int]], None],
        length_context: LengthContext,
    ) -> None:
        self._target = target
        self._drafters = drafters
        self._catalogue = catalogue
        self._tokenizer = tokenizer
        self._check_queue = check_queue
        self._plans: dict[SpeculationConfig, Plan] = {}
        self._eos_token_ids = tuple(eos_token_ids)
        self.length_context = _completed(length_context, target)
        self.constraints = ConstraintCompiler(tokenizer, target.vocab_size, self._eos_token_ids)

    def session(self, request: Request) -> Session:
        """Make the session of a request, with the request's committed tokens.

        Raises:
            InvalidArgument, ResourceExhausted: as :meth:`Engine.submit`.
        """
        params, target = request.params, self._target
        if request.adapter:
            check_adapter(request.adapter, target.adapters)
        if len(request.continuations):
            return self._scored_tree(request)
        prompt_ids = self._checked_prompt(request.prompt_ids)
        if len(request.committed) > target.context_length:
            raise InvalidArgument(
                "committed_token_ids", f"{len(request.committed)} tokens",
                f"at most as many as the context has, {target.context_length}",
            )  # fmt: skip
        committed = self.checked_tokens("committed_token_ids", request.committed)
        # Before a plan is made: that takes longer, and sessions take turns to try drafters.
        self._check_queue(request.tenant, request.priority, [*prompt_ids, *committed])
        plan = self._plan(request)
        if (ranks := self._ranks(plan, params)) is not None:
            plan = plan.with_ranks(ranks.rates())
        self._check_prediction(request.prediction, plan)
        self._check_params(params)
        session = Session(
            request.session_id or secrets.token_hex(8), prompt_ids, params, plan,
            eos_token_ids=self._eos_token_ids,
            max_length=target.context_length,
            tokenizer=self._tokenizer,
            length_context=self.length_context,
            prediction=request.prediction,
            constraint=request.constraint or self.constraints.compile(params),
            rule=trained_rule(plan.rule, self.length_context),
        )  # fmt: skip
        _check_min_tokens(session)
        if session.constraint is None:  # else siblings that it forbids are missing in drafts
            session.ranks = ranks
            if plan.method.reads_constraint and not plan.method.uses:  # nothing is forced
                session.length_controller = AR_PLAN.new_length_controller()
        if committed:
            session.resume(committed)
        return self._taken(session, request)

    def _check_params(self, params: SamplingParams) -> None:
        params.check_vocabulary(self._target.vocab_size)
        if params.stop and self._tokenizer is None:
            raise InvalidArgument("stop", params.stop, "no stop strings: no tokenizer is loaded")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and not isinstance(self._target, ModelTarget):
                raise InvalidArgument(name, value, "none: the target is in another process")

    def _taken(self, session: Session, request: Request) -> Session:
        """The session with what the request says of its owner, if it can ever run."""
        session.traceparent = request.traceparent
        session.tenant, session.weight = request.tenant, request.weight
        session.priority = request.priority
        session.adapter, session.teaches_drafter = request.adapter, request.teaches_drafter
        session.client_needs = request.needs
        if most_entries(session) > self._target.kv_capacity:
            remedy = "lower max_tokens" if session.branches is None else "send fewer continuations"
            raise ResourceExhausted(
                f"the request needs {most_entries(session)} KV entries, this replica has "
                f"{self._target.kv_capacity}: shorten the prompt or {remedy}",
                retry_after_s=0,
            )
        return session

    def _scored_tree(self, request: Request) -> Session:
        """The session of a request with continuations: nothing is drafted, nor generated after it.

        Raises: as :meth:`session`.
        """
        params = request.params
        prompt_ids = self._checked_prompt(request.prompt_ids)
        continuations = self._checked_continuations(request.continuations, len(prompt_ids))
        if params.max_tokens != 1:
            raise InvalidArgument("max_tokens", params.max_tokens, "1 with continuations")
        if params.constraint is not None:
            raise InvalidArgument(params.constraint[0], "set", "none with continuations")
        for name, given in (
            ("speculation", request.speculation),
            ("prediction", request.prediction),
            ("committed_token_ids", request.committed),
        ):
            if given:
                raise InvalidArgument(name, "set", "nothing with continuations")
        self._check_params(params)
        self._check_queue(request.tenant, request.priority, prompt_ids)
        session = ScoredTree(
            request.session_id or secrets.token_hex(8), prompt_ids, params, continuations,
            eos_token_ids=self._eos_token_ids, tokenizer=self._tokenizer,
        )  # fmt: skip
        _check_min_tokens(session)
        return self._taken(session, request)

    def _checked_continuations(
        self, continuations: Sequence[Sequence[int]], prompt_length: int
    ) -> list[list[int]]:
        if not isinstance(self._target, ModelTarget):
            allowed = "none: the target is in another process"
            raise InvalidArgument("continuations", f"{len(continuations)} sequences", allowed)
        CONTINUATIONS.check(len(continuations))
        CONTINUATION_TOKENS.check(sum(map(len, continuations)))
        room = self._target.context_length - prompt_length
        for i, each in enumerate(continuations):
            if len(each) >= room:
                raise InvalidArgument(
                    f"continuations[{i}]", f"{len(each)} tokens",
                    f"fewer tokens than the prompt leaves of the context, {room}",
                )  # fmt: skip
        return [
            self.checked_tokens(f"continuations[{i}]", each) for i, each in enumerate(continuations)
        ]

    def prepare(self, speculation: SpeculationConfig | None) -> None:
        """Make the drafters of a method, so that its first request does not wait for their weights.

        Raises:
            InvalidArgument: this engine cannot run the method.
        """
        self._plan(Request((0,), SamplingParams(), speculation))

    def refusal(self, method: Method) -> str | None:
        """Why a method cannot run here; None if it can."""
        if (reason := self._drafters.refusal(method)) is not None:
            return reason
        rule = ACCEPTANCE_RULES[method.acceptance]
        needs = method.needs | rule.needs
        lacking = sorted(need.value for need in needs - self._target.provides)
        if not lacking:
            try:
                trained_rule(rule, self.length_context)
            except InvalidArgument as error:
                return str(error)
        if not lacking:
            return None
        why = why_lacking(self._target, needs)
        return f"the target does not give its {', '.join(lacking)}{why}"

    def _plan(self, request: Request) -> Plan:
        """The plan of the request's method; makes the drafters that it needs."""
        plan = self._resolved(self._with_drafters(request))
        needs = plan.needs | plan.rule.needs
        lacking = sorted(need.value for need in needs - self._target.provides)
        if lacking:
            raise InvalidArgument(
                "method", plan.method.name,
                f"a method that does not need the target's {', '.join(lacking)}, which this target "
                "on the general path does not give (docs/models.md has the fast path's)"
                f"{why_lacking(self._target, needs)}",
            )  # fmt: skip
        self._drafters.ensure(
            plan, lambda: sorted(n for n, m in self._catalogue.items() if not self.refusal(m))
        )
        if plan.rule.name == "greedy" and request.params.temperature > 0:
            raise InvalidArgument("acceptance", "greedy", "'coupled' when temperature is above 0")
        return plan

    def _resolved(self, config: SpeculationConfig) -> Plan:
        """The plan of a config: to resolve one anew for each request, refused ones included, takes
        0.3 ms."""
        plan = self._plans.get(config)
        if plan is None:
            plan = resolve(config, self._catalogue)
            if len(self._plans) >= MOST_PLANS:  # a client that varies a knob
                self._plans.clear()
            self._plans[config] = plan
        return plan

    def _ranks(self, plan: Plan, params: SamplingParams) -> RankRates | None:
        """What is known of the candidates of a plan's drafter; None if its tree does not follow it.

        It depends on the drafter's weights, and on how candidates are chosen.
        """
        if not plan.measures_ranks:
            return None
        drafter = plan.method.drafter
        draws = "argmax" if params.is_plain_argmax else plan.rule.draws.value
        weights = self.length_context.weights_of(drafter)
        return experience_of(self.length_context).ranks(drafter, weights, draws)

    def _with_drafters(self, request: Request) -> SpeculationConfig:
        """The request's config; method ``auto`` gets all of its drafters that can draft here."""
        config = request.speculation or SpeculationConfig()
        if config.method != "auto" or config[DRAFTERS]:
            return config
        names: list[str] = []
        # A drafter that waits for another process gets tokens alone.
        reads_states = not self._drafters.remote
        roster = experience_of(self.length_context).roster
        workload = workload_of(len(request.prompt_ids), bool(request.prediction), request.params)
        num_sessions = self.length_context.num_sessions() + 1
        for methods in AUTO_CHOICES:
            for method in (self._catalogue[name] for name in methods if name in self._catalogue):
                if (
                    (reads_states or not method.needs)
                    and not self.refusal(method)
                    and (request.prediction or not method.reads_prediction)
                    and (request.params.constraint or not method.reads_constraint)
                ):
                    name, is_free = method.drafter, not method.needs and num_sessions < CROWD
                    if method.needs and not self._reads_little(name, request):
                        break
                    if is_free or roster.joins(name, workload, num_sessions):
                        names.append(name)
                    break
        return config.model_copy(update={DRAFTERS.name: tuple(names) or None})

    def _reads_little(self, head: str, request: Request) -> bool:
        """Whether a head, and the target for it, have little to read before the first round.

        The target must compute what the head has not read, also what the prefix cache has.
        """
        prompt, owner = request.prompt_ids, (request.tenant, request.adapter)
        drafter = self._drafters.get(head)
        known = 0 if drafter is None else drafter.num_known(prompt, *owner)
        cached = num_cached(self._target, prompt[:-1], *owner)
        share = int(AGAIN_SHARE * request.params.max_tokens)
        again = max(MOST_AGAIN, min(share, MOST_AGAIN_OF_LONG))
        if self.length_context.num_sessions() + 1 >= CROWD:
            again = 0
        return len(prompt) - known <= LONGEST_READ and cached - known <= again

    def _check_prediction(self, prediction: Sequence[int], plan: Plan) -> None:
        if not prediction:
            return
        if not plan.reads_prediction:
            able = sorted(m.name for m in self._catalogue.values() if m.reads_prediction)
            raise InvalidArgument(
                "prediction", f"{len(prediction)} tokens",
                f"none with method {plan.method.name!r}, or one of the methods that use it: "
                + ", ".join(able),
            )  # fmt: skip
        if len(prediction) > self._target.context_length:
            raise InvalidArgument(
                "prediction", f"{len(prediction)} tokens",
                f"at most as many tokens as the context has, {self._target.context_length}",
            )  # fmt: skip
        for i, token in enumerate(prediction):
            if not 0 <= token < self._target.vocab_size:
                raise InvalidArgument(
                    f"prediction[{i}]", token, f"token ids in [0, {self._target.vocab_size})"
                )

    def _checked_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        if not len(prompt_ids):
            raise InvalidArgument("prompt", "", "at least one token")
        if len(prompt_ids) >= self._target.context_length:
            raise InvalidArgument(
                "prompt", f"{len(prompt_ids)} tokens",
                f"fewer tokens than the context of {self._target.context_length}",
            )  # fmt: skip
        return self.checked_tokens("prompt_token_ids", prompt_ids)

    def checked_tokens(self, field: str, token_ids: Sequence[int]) -> list[int]:
        """Check token ids from outside; InvalidArgument names ``field`` if one is unknown."""
        size, checked = self._target.vocab_size, []
        for i, token in enumerate(token_ids):
            try:
                value = operator.index(token)
            except TypeError:
                value = -1
            if not 0 <= value < size:
                raise InvalidArgument(f"{field}[{i}]", token, f"token ids in [0, {size})")
            checked.append(value)
        return checked


def _check_min_tokens(session: Session) -> None:
    params = session.params
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed and session.stop_ids.issuperset(allowed):
        raise InvalidArgument(
            "allowed_token_ids", allowed, "with min_tokens also one that does not end the output"
        )


def _completed(context: LengthContext, target: Target) -> LengthContext:
    """The length controllers' context, completed with facts about the target."""
    context = replace(context, vocab_size=context.vocab_size or target.vocab_size)
    if not target.num_layers:
        return context
    return replace(
        context,
        num_layers=target.num_layers,
        head_layers=target.head_layers,
        exit_logits=target.exit_logits,
    )
