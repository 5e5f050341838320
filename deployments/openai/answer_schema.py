"""What the API answers, for openapi.json; tests hold real answers against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answered(BaseModel):
    """A part of an answer, with all its keys."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Answered):
    """What is wrong.

    `param` is the key of the request, `code` a word for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answered):
    error: ErrorDetails


class Health(Answered):
    status: Literal["ok"]


class Version(Answered):
    version: str


class Model(Answered):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    methods: list[str]
    default_method: str
    has_chat_template: bool


class ModelList(Answered):
    object: Literal["list"]
    data: list[Model]


class CompletionTokensDetails(Answered):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answered):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class SpeculativeDecoding(Answered):
    """How much was drafted and accepted, in vLLM's form."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class PromptScores(Answered):
    """Tokens that the target computed to score the prompts, shared beginnings once; and forwards.

    A forward that several of the request's readings share counts for each of them.
    """

    num_positions: int
    num_target_forwards: int


class Denoising(Answered):
    """What the answer cost a masked-diffusion model (``engine: diffusion``)."""

    num_blocks: int
    num_forwards: int
    tokens_per_forward: float


class RequestMetrics(Answered):
    speculative_decoding: SpeculativeDecoding | None
    denoising: Denoising | None = None
    prompt_scores: PromptScores | None = None


class Numerics(Answered):
    """Fingerprints of the targets, and whether one with other numerics went on."""

    fingerprints: list[str]
    changed: bool


class PromptLogprob(Answered):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class RoundDraft(Answered):
    token_ids: list[int]
    texts: list[str]
    parent_indices: list[int]
    accepted_indices: list[int]


class AnsweredRound(Answered):
    """What a round drafted and committed (`return_rounds`)."""

    round: int
    token_ids: list[int]
    texts: list[str]
    num_accepted: int
    seconds: float
    draft: RoundDraft


class _Choice(Answered):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    rounds: list[AnsweredRound] | None = None


class CompletionLogprobs(Answered):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None


class DrafterExplanation(Answered):
    rounds: int
    accepted: int
    acceptance: list[float]
    promised_tokens_per_second: float


class Explanation(Answered):
    """What method `auto` chose, and why (`return_explanation`)."""

    workload: str
    ar_rounds: int
    ar_round_ms: float
    last: str
    drafters: dict[str, DrafterExplanation]


class _Whole(Answered):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: RequestMetrics
    numerics: Numerics
    explanations: list[Explanation | None] | None = None


class CompletionObject(_Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprob(Answered):
    token: str
    logprob: float
    bytes: list[int]


class TokenWithTop(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answered):
    content: list[TokenWithTop]
    refusal: None


class CalledFunction(Answered):
    """The function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Answered):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answered):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatObject(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None


class OutputPart(Answered):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[TokenWithTop] | None = None


class OutputItem(Answered):
    """A message, thoughts or a call, by its `type`."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed"]
    role: Literal["assistant"] | None = None
    content: list[OutputPart] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputTokensDetails(Answered):
    """Always 0: cached tokens are not counted for a request."""

    cached_tokens: int


class OutputTokensDetails(Answered):
    """Always 0: tokens of thoughts are not counted apart."""

    reasoning_tokens: int


class ResponseUsage(Answered):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Answered):
    reason: Literal["max_output_tokens"]


class ResponseObject(Answered):
    """An answer of /v1/responses; nothing of it is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metrics: RequestMetrics | None = None
    numerics: Numerics | None = None


class Tokens(Answered):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answered):
    prompt: str
