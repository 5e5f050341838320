"""A request on its way through vLLM: checked, translated, and its outputs counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from paceline.config import SpeculationConfig
from paceline.deployments.engines.vllm_target import VllmTarget
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.plan import Plan
from paceline.request import Request
from paceline.sampling import TokenLogprobs
from paceline.session import Session, SessionState


def check_request(request: Request, plan: Plan, target: VllmTarget) -> None:
    """Check what may be wrong with a request, before vLLM gets it.

    Raises:
        InvalidArgument: a prompt, token id, sampling parameter or prediction that does not fit the
            target or the method.
        FailedPrecondition: vLLM cannot go on with the committed tokens.
    """
    prompt_ids, committed, params = request.prompt_ids, request.committed, request.params
    if not len(prompt_ids):
        raise InvalidArgument("prompt", "[]", "at least one token")
    if len(prompt_ids) >= target.context_length:
        raise InvalidArgument(
            "prompt", f"{len(prompt_ids)} tokens",
            f"fewer tokens than the context has, {target.context_length}",
        )  # fmt: skip
    if request.priority:
        raise InvalidArgument("priority", request.priority, "0 with engine vllm")
    if params.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs", params.prompt_logprobs, "none with engine vllm")
    if request.continuations:
        count = f"{len(request.continuations)} sequences"
        raise InvalidArgument("continuations", count, "none with engine vllm")
    if len(committed) and (params.penalizes_output or params.constraint is not None):
        raise FailedPrecondition(
            "vLLM cannot go on with an output that penalties or a constraint count from its "
            "beginning"
        )
    for i, token in enumerate((*prompt_ids, *committed)):
        if not 0 <= token < target.vocab_size:
            raise InvalidArgument(
                f"token_ids[{i}]", token, f"token ids in [0, {target.vocab_size})"
            )
    params.check_vocabulary(target.vocab_size)
    if len(request.prediction) and not plan.reads_prediction:
        raise InvalidArgument(
            "prediction", f"{len(request.prediction)} tokens",
            f"none with method {plan.method.name!r}, or method 'predicted_outputs'",
        )  # fmt: skip


def vllm_prompt(session: Session) -> dict[str, Any]:
    """The session's tokens as vLLM's prompt, committed output included."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(session.token_ids)}
    if session.tenant:
        prompt["cache_salt"] = session.tenant
    return prompt


def vllm_params(session: Session, speculation: SpeculationConfig, eos: Sequence[int]) -> Any:
    """vLLM's SamplingParams of a session.

    Stop strings are left out: the session finds them itself.

    Args:
        speculation: as the request gave it; Paceline's proposer gets the fields that were set.
        eos: the model's end-of-sequence tokens.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    params = session.params
    stops = [*params.stop_token_ids, *(() if params.ignore_eos else eos)]
    draft_options: dict[str, Any] = {}
    if session.plan.method.engine == "paceline":
        given = speculation.model_dump(mode="json", exclude_unset=True)
        draft_options = {"speculation": given, "prediction": list(session.prediction)}
    structured = None
    if params.constraint is not None:
        kind, text = params.constraint
        structured = StructuredOutputsParams(**{"json" if kind == "json_schema" else kind: text})
    return VllmParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias or None,
        stop_token_ids=stops,
        ignore_eos=structured is None,
        seed=params.seed if params.temperature > 0 else None,
        max_tokens=session.remaining,
        min_tokens=min(session.remaining, max(0, params.min_tokens - len(session.output_ids))),
        allowed_token_ids=list(params.allowed_token_ids) or None,
        logprobs=params.logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=structured,
        extra_args={"paceline": draft_options},
    )


def count_step(session: Session, num_tokens: int) -> None:
    """Count an output of vLLM as a round; exact while each output is read as it comes.

    Args:
        num_tokens: tokens that the session committed from it.
    """
    stats = session.stats
    now = time.perf_counter()
    if stats.first_token_at is None:
        stats.first_token_at = now
        if not session.finished:  # a stop string in the first output ends it
            session.state = SessionState.READY
    session.note_output()
    stats.num_rounds += 1
    stats.num_target_forwards += 1
    stats.num_accepted += max(0, num_tokens - 1)


def count_drafts(session: Session, metrics: Any) -> None:
    """Replace the session's counters by vLLM's own, which it gives with the last output."""
    if metrics is None:
        return
    stats = session.stats
    drafted, accepted = metrics.per_step_drafted, metrics.per_step_accepted
    stats.num_drafted = stats.num_draft_nodes = sum(drafted)
    stats.num_accepted = min(sum(accepted), stats.num_tokens)
    stats.num_rounds = stats.num_target_forwards = max(1, stats.num_tokens - stats.num_accepted)
    depth = max(drafted, default=0)
    stats.drafted_by_depth = [sum(d > level for d in drafted) for level in range(depth)]
    stats.accepted_by_depth = [sum(a > level for a in accepted) for level in range(depth)]


def logprobs_of(session: Session, output: Any, before: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of the tokens that an output added to a session of ``before`` tokens."""
    count = session.params.logprobs
    if count is None or output.logprobs is None:
        return ()
    entries = []
    for token, found in zip(session.token_ids[before:], output.logprobs, strict=False):
        best = sorted(found.items(), key=lambda item: item[1].rank)[:count]
        top = tuple((token_id, entry.logprob) for token_id, entry in best)
        entries.append(TokenLogprobs(token, found[token].logprob, top))
    return tuple(entries)
