"""Answers of completions and chat: requests to the targets, and bodies made of their replies."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import paceline
from paceline.bounds import CONSTRAINT_BYTES
from paceline.chat import render_chat
from paceline.config import parse_speculation
from paceline.deployments.openai.output import Delta, OutputParser, Thinking, merged
from paceline.deployments.openai.schema import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    Message,
)
from paceline.deployments.openai.scores import Reading, readings
from paceline.deployments.openai.tools import Tool, ToolChoice, Tools, prompt_messages, thinks
from paceline.drafters.predicted_outputs import method_with_prediction
from paceline.errors import InvalidArgument
from paceline.methods import DIFFUSION_METHODS
from paceline.rpc.errors import ServerUnavailable
from paceline.rpc.gen.paceline.v1 import common_pb2, generate_pb2
from paceline.rpc.messages import explanation_of, sampling_to_message, speculation_to_message
from paceline.sampling import MAX_SEED, SamplingParams

Body = dict[str, Any]
TokenEntry = generate_pb2.TokenLogprobs | generate_pb2.TopLogprob


class ChatLike(Protocol):
    """What a conversation's prompt is made of."""

    messages: list[Message]
    tools: list[Tool] | None
    tool_choice: ToolChoice | None
    reasoning_effort: Any
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool | None


class AnswerChoice:
    """One choice of an answer, as far as its generation has come."""

    def __init__(self, index: int, *, drops_output: bool = False) -> None:
        self.index = index
        self.drops_output = drops_output  # the request wants no token
        self.begun = False  # a chunk has been sent
        self.text = ""
        self.prompt_logprobs: list[generate_pb2.TokenLogprobs] = []
        self.token_ids: list[int] = []
        self.logprobs: list[generate_pb2.TokenLogprobs] = []
        self.offset = (
            0  # of the next token in the text, in characters; streamed log-probabilities name it
        )
        self.rounds: list[Body] = []  # only if the request asks for them
        self.fingerprint = ""  # numerics of the target that committed the last token
        self.numerics_changed = False
        self.last: generate_pb2.GenerateReply | None = None

    def add(self, reply: generate_pb2.GenerateReply) -> None:
        """Add a reply of the target.

        Raises:
            ServerUnavailable: the target stopped before the end.
        """
        if reply.fingerprint and not self.token_ids:  # of a target: what a lost one told is void
            self.prompt_logprobs.clear()
        self.prompt_logprobs.extend(reply.prompt_logprobs)
        if self.drops_output:
            for name in ("text", "token_ids", "logprobs", "draft", "stop_string", "stop_token_id"):
                reply.ClearField(name)
            if reply.finish_reason:
                reply.finish_reason = reply.finish_reason.replace("stop", "length")
                reply.statistics.num_tokens = 0
        self.text += reply.text
        self.token_ids.extend(reply.token_ids)
        self.logprobs.extend(reply.logprobs)
        self.fingerprint = reply.fingerprint or self.fingerprint
        self.numerics_changed |= reply.numerics_changed
        if reply.HasField("draft"):
            self.rounds.append(round_body(reply))
        if reply.finish_reason == "cancelled":
            raise ServerUnavailable("the target is going away: send the request again")
        if reply.finish_reason:
            self.last = reply

    @property
    def cumulative_logprob(self) -> float:
        """Log-probability of the whole output; only if the target was asked for its parts."""
        return sum(entry.logprob for entry in self.logprobs)

    @property
    def end(self) -> Body:
        """Why it ended; null while it has not."""
        cause = None
        if self.last is not None:
            kind = self.last.WhichOneof("stop_cause")
            cause = getattr(self.last, kind) if kind else None
        reason = self.last.finish_reason if self.last is not None else None
        return {"finish_reason": reason, "stop_reason": cause}


class Answer(ABC):
    """One HTTP request: its requests to the targets, and the bodies that answer it."""

    kind: str  # "object" of the body
    chunk_kind: str

    def __init__(self, body: CompletionRequest | ChatRequest, model: generate_pb2.Model) -> None:
        body.check()
        self.body = body
        self.model = model
        self.created = int(time.time())
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.n = body.n or 1
        try:
            self.messages = self._messages()
        except UnicodeEncodeError:
            raise InvalidArgument(
                body.not_unicode() or "body", "half of a surrogate pair", "Unicode text"
            ) from None
        drops = isinstance(body, CompletionRequest) and body.scores_only
        self.choices = [AnswerChoice(i, drops_output=drops) for i in range(len(self.messages))]

    id_prefix: str

    def add(self, index: int, reply: generate_pb2.GenerateReply) -> None:
        """Add a reply to one of :attr:`messages`.

        Raises: as :meth:`AnswerChoice.add`.
        """
        self.choices[index].add(reply)

    @abstractmethod
    def prompts(self) -> list[generate_pb2.GenerateRequest]:
        """A request to the targets for each prompt, with nothing but the prompt."""

    @abstractmethod
    def whole(self, choice: AnswerChoice) -> Body:
        """A finished choice of the body."""

    @abstractmethod
    def piece(self, choice: AnswerChoice, reply: generate_pb2.GenerateReply) -> Body:
        """A choice of a streamed chunk: what a reply adds.

        A round's tokens may complete no text (half of a character, the start of a stop string); the
        chunk still carries their ids and log-probabilities.
        """

    def opening(self) -> Iterable[Body]:
        """The chunks that come before the first text."""
        return ()

    def events(self, choice: AnswerChoice, reply: generate_pb2.GenerateReply) -> Iterable[Body]:
        """The chunks for a reply, which the choice has already."""
        if reply.prompt_logprobs:  # they come before the tokens, and the next chunk has them
            return
        more: Body = {}
        if self.finished and not self.body.wants_usage:
            more = {"metrics": self._metrics(), **self._explanations()}
        piece = self.piece(choice, reply)
        if reply.HasField("draft"):
            piece["round"] = choice.rounds[-1]
        yield self.chunk([piece], **more)

    def ending(self) -> Iterable[Body | str]:
        """The chunks that come after the last text; a text is sent as it is."""
        if self.body.wants_usage:
            yield self.chunk([], **self.closing())
        yield "[DONE]"

    def failure(self, error: Body) -> Body:
        """The last chunk of a stream that an error ends; ``error`` is its body."""
        return error

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.last is not None for choice in self.choices)

    @property
    def keys(self) -> dict[str, str]:
        """Fields of the target's messages, and the keys that the request has for them."""
        return self.body.keys

    def sampling(self, seed: int) -> Body:
        """Fields of SamplingParams, with ``seed`` where the request has none."""
        return self.body.sampling(seed)

    def _messages(self) -> list[generate_pb2.GenerateRequest]:
        """The requests to the targets, choice by choice.

        The first choice has the request's seed, or a random one if there is none, and choice i that
        seed + i. So choice i equals the only choice of a request with that seed.
        """
        prompts = self.prompts()
        samples = self.body.num_samples
        if len(prompts) * samples > MAX_CHOICES:
            name = "n" if self.body.best_of is None else "best_of"
            raise InvalidArgument(name, samples, f"at most {MAX_CHOICES} choices in one request")
        seed = secrets.randbelow(MAX_SEED - MAX_CHOICES)
        values = self.sampling(seed)
        values.setdefault("max_tokens", self.model.context_length)
        speculation = self._speculation()
        messages = []
        for prompt in prompts:
            for i in range(samples):
                params = SamplingParams(**{**values, "seed": values["seed"] + i & MAX_SEED})
                if i and not self.body.stream:  # the first choice has them
                    params = replace(params, prompt_logprobs=None)
                message = generate_pb2.GenerateRequest()
                message.CopyFrom(prompt)
                message.sampling.CopyFrom(sampling_to_message(params))
                message.return_draft = bool(self.body.return_rounds)
                message.return_explanation = bool(self.body.return_explanation)
                message.priority = self.body.priority or 0
                message.numerics_mismatch = self.body.numerics_mismatch or ""
                message.adapter = self.adapter
                if speculation is not None:
                    message.speculation.CopyFrom(speculation)
                if self.body.prediction is not None:
                    message.prediction_text = self.body.prediction.text
                messages.append(message)
        return messages

    @property
    def adapter(self) -> str:
        """The target's adapter that the request names as its model; "" is none."""
        asked = self.body.model or ""
        return asked if asked in self.model.adapters else ""

    def _speculation(self) -> common_pb2.Speculation | None:
        given = self.body.speculation
        if given is None:
            return None
        config = parse_speculation({"method": self.method, **given})
        return speculation_to_message(config)

    @property
    def method(self) -> str:
        """The method that the request names, else the target's default."""
        default = self.model.default_method
        if self.body.prediction is not None and self.body.prediction.text:
            default = method_with_prediction(default, self.model.methods)
        return str((self.body.speculation or {}).get("method", default))

    def result(self) -> Body:
        """The body of an answer that is not streamed."""
        return {
            **self._head(self.kind),
            "choices": [
                self.whole(choice) | ({"rounds": choice.rounds} if choice.rounds else {})
                for choice in self._best()
            ],
            **self.closing(),
        }

    def _best(self) -> list[AnswerChoice]:
        """The choices of the answer: of each prompt's samples, the n most likely."""
        samples = self.body.num_samples
        for start in range(0, len(self.choices), samples):
            for choice in self.choices[start + 1 : start + samples]:
                choice.prompt_logprobs = self.choices[start].prompt_logprobs
        if samples == self.n:
            return self.choices
        best = []
        for start in range(0, len(self.choices), samples):
            group = sorted(
                self.choices[start : start + samples], key=lambda c: -c.cumulative_logprob
            )
            best += group[: self.n]
        for index, choice in enumerate(best):
            choice.index = index
        return best

    def closing(self) -> Body:
        """The keys that are known at the end: usage, metrics, numerics and explanations."""
        numerics = {
            "fingerprints": list(dict.fromkeys(choice.fingerprint for choice in self.choices)),
            "changed": any(choice.numerics_changed for choice in self.choices),
        }
        return {
            "usage": self._usage(), "metrics": self._metrics(), "numerics": numerics,
            **self._explanations(),
        }  # fmt: skip

    def token_name(self, entry: TokenEntry) -> str:
        """The name of a token in log-probabilities."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{entry.token_id}"
        return token_name_of(entry.text)

    def prompt_logprobs(self, choice: AnswerChoice) -> list[Body | None]:
        """The prompt's log-probabilities in vLLM's form: for each token null, or entries by id."""
        found: list[Body | None] = []
        for entry in choice.prompt_logprobs:
            ranked = [(other, rank) for rank, other in enumerate(entry.top, 1)]
            own = [] if entry.token_id in (other.token_id for other in entry.top) else [
                (entry, entry.rank)
            ]  # fmt: skip
            entries = {
                str(each.token_id): {
                    "logprob": each.logprob,
                    "rank": rank,
                    "decoded_token": token_name_of(each.text),
                }
                for each, rank in (*own, *ranked)
            }
            found.append(entries if entry.HasField("logprob") else None)
        return found

    def chunk(self, choices: Sequence[Body], **more: Any) -> Body:
        return {**self._head(self.chunk_kind), "choices": list(choices), **more}

    def _head(self, kind: str) -> Body:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.adapter or self.model.name,
            "system_fingerprint": f"paceline-{paceline.__version__}",
        }

    @property
    def _last(self) -> list[generate_pb2.GenerateReply]:
        return [choice.last for choice in self.choices if choice.last is not None]

    def _usage(self) -> Body:
        last = self._last
        prompt = sum(reply.prompt_length for reply in last[:: self.body.num_samples])
        completion = sum(reply.statistics.num_tokens for reply in last)
        predicted = sum(reply.num_predicted for reply in last)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": predicted,
                "rejected_prediction_tokens": sum(r.prediction_length for r in last) - predicted,
            },
        }

    def _explanations(self) -> Body:
        """What method `auto` chose for each choice, and why, where the request asks for it."""
        if not self.body.return_explanation:
            return {}
        return {"explanations": [explanation_of(reply) for reply in self._last]}

    def _metrics(self) -> Body:
        if self.method == "ar":
            return {"speculative_decoding": None}
        if self.method in DIFFUSION_METHODS:
            return {"speculative_decoding": None, "denoising": denoising(self._last)}
        return {"speculative_decoding": speculative_decoding(r.statistics for r in self._last)}


def denoising(last: Iterable[generate_pb2.GenerateReply]) -> Body:
    """What a request cost a masked-diffusion model: a round of one is a block."""
    statistics = [reply.statistics for reply in last]
    num_forwards = sum(each.num_target_forwards for each in statistics)
    return {
        "num_blocks": sum(each.num_rounds for each in statistics),
        "num_forwards": num_forwards,
        "tokens_per_forward": sum(s.num_tokens for s in statistics) / max(1, num_forwards),
    }


def speculative_decoding(statistics: Iterable[common_pb2.Statistics]) -> Body:
    """A request's acceptance in the form that vLLM reports and AIPerf reads.

    A step is a round with a draft. ``acceptance_histogram[j]`` counts the steps that accepted
    exactly ``j`` drafted tokens, and ``num_spec_tokens`` is the depth of the deepest draft.
    """
    drafted: list[int] = []  # steps whose draft was deeper than i
    accepted: list[int] = []  # steps that accepted more than i tokens
    for each in statistics:
        for total, counts in ((drafted, each.drafted_by_depth), (accepted, each.accepted_by_depth)):
            total += [0] * (len(counts) - len(total))
            for i, count in enumerate(counts):
                total[i] += count
    steps = drafted[0] if drafted else 0
    at_least = [steps, *accepted, 0]
    num_drafted, num_accepted = sum(drafted), sum(accepted)
    return {
        "mean_acceptance_length": 1 + num_accepted / steps if steps else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": [a - b for a, b in pairwise(at_least)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": len(drafted),
    }


def round_body(reply: generate_pb2.GenerateReply) -> Body:
    """What a round drafted and committed, for requests with ``return_rounds``."""
    draft = reply.draft
    return {
        "round": reply.round,
        "token_ids": list(reply.token_ids),
        "texts": list(draft.committed_texts),
        "num_accepted": reply.num_accepted,
        "seconds": round(draft.seconds, 6),
        "draft": {
            "token_ids": list(draft.token_ids),
            "texts": list(draft.texts),
            "parent_indices": list(draft.parent_indices),
            "accepted_indices": list(draft.accepted_indices),
        },
    }


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"
    body: CompletionRequest

    def __init__(self, body: CompletionRequest, model: generate_pb2.Model) -> None:
        super().__init__(body, model)
        self._readings: list[Reading] = []  # of messages, if prompts may be read together
        if body.may_share:
            self._readings = readings(self.messages, model)
            self.messages = [reading.message for reading in self._readings]
        # What the target says of a message, and not of one of its prompts.
        self._read = [AnswerChoice(i) for i in range(len(self.messages))]

    def add(self, index: int, reply: generate_pb2.GenerateReply) -> None:
        if not self.messages[index].continuations:
            super().add(index, reply)
            return
        members = self._readings[index].members
        whole = self._read[index]
        if reply.fingerprint:  # of a target: what a lost one told is void
            for i in members:
                self.choices[i] = AnswerChoice(i, drops_output=self.body.scores_only)
        whole.add(reply)
        for part in reply.continuations:
            choice = self.choices[members[part.index]]
            choice.fingerprint = whole.fingerprint
            choice.numerics_changed = whole.numerics_changed
            if not choice.prompt_logprobs:
                choice.prompt_logprobs.extend(whole.prompt_logprobs)
            choice.add(part.reply)

    def _metrics(self) -> Body:
        metrics = super()._metrics()
        if self.body.reads_only:
            last = [each.last for each in self._read if each.last is not None] or self._last
            metrics["prompt_scores"] = {
                "num_positions": sum(r.num_positions or r.prompt_length for r in last),
                "num_target_forwards": sum(
                    r.statistics.num_prefill_forwards + r.statistics.num_target_forwards
                    for r in last
                ),
            }
        return metrics

    async def prepare(self, detokenize: Callable[[Sequence[int]], Awaitable[str]]) -> None:
        """Find the texts of prompts that are token ids, if the answer repeats them.

        Where it has their log-probabilities, those come with the texts.
        """
        self._echoed: list[str | None] = []
        for prompt in self.body.prompts() if self.body.echo else ():
            text = prompt if isinstance(prompt, str) else None
            if not isinstance(prompt, str) and self.body.logprobs is None:
                text = await detokenize(prompt)
            self._echoed.append(text)

    def prompts(self) -> list[generate_pb2.GenerateRequest]:
        messages = []
        for prompt in self.body.prompts():
            message = generate_pb2.GenerateRequest(
                add_special_tokens=self.body.add_special_tokens is not False
            )
            if isinstance(prompt, str):
                message.text = prompt
            else:
                try:
                    message.token_ids.token_ids.extend(prompt)
                except ValueError:
                    raise InvalidArgument(
                        "prompt", prompt, f"token ids in [0, {self.model.vocab_size})"
                    ) from None
            messages.append(message)
        return messages

    def whole(self, choice: AnswerChoice) -> Body:
        return self._choice(choice, choice.text, choice.token_ids, choice.logprobs)

    def piece(self, choice: AnswerChoice, reply: generate_pb2.GenerateReply) -> Body:
        return self._choice(choice, reply.text, reply.token_ids, reply.logprobs)

    def _choice(
        self,
        choice: AnswerChoice,
        text: str,
        token_ids: Iterable[int],
        logprobs: Iterable[generate_pb2.TokenLogprobs],
    ) -> Body:
        if self.body.echo and not choice.begun:
            prompt = self._echoed[choice.index // self.n]
            if prompt is None:
                pieces = b"".join(entry.text for entry in choice.prompt_logprobs)
                prompt = pieces.decode(errors="replace")
            text = prompt + text
            logprobs = (*choice.prompt_logprobs, *logprobs)
        choice.begun = True
        body: Body = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, logprobs),
            **choice.end,
        }
        if self.body.return_token_ids:
            body["token_ids"] = list(token_ids)
        if self.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.prompt_logprobs(choice)
        return body

    def _logprobs(
        self, choice: AnswerChoice, entries: Iterable[generate_pb2.TokenLogprobs]
    ) -> Body | None:
        if self.body.logprobs is None:
            return None
        body: Body = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            name, known = self.token_name(entry), entry.HasField("logprob")
            # The prompt's have more where `prompt_logprobs` asks for more.
            best = entry.top[: self.body.logprobs]
            top = {self.token_name(other): other.logprob for other in best}
            body["tokens"].append(name)
            body["token_logprobs"].append(entry.logprob if known else None)
            body["top_logprobs"].append({**top, name: entry.logprob} if known else None)
            body["text_offset"].append(choice.offset)
            choice.offset += len(entry.text.decode(errors="ignore"))
        return body


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    body: ChatRequest

    def __init__(
        self, body: ChatRequest, model: generate_pb2.Model, marker_id: int | None = None
    ) -> None:
        """``marker_id``: the special token that begins the model's calls, if it is one."""
        self._marker_id = marker_id
        super().__init__(body, model)

    def prompts(self) -> list[generate_pb2.GenerateRequest]:
        body, model = self.body, self.model
        template = model.chat_template
        self._tools = Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls, template)
        text = chat_prompt(body, model)
        self._thinking = self._thoughts(text)
        self._parsers: dict[int, OutputParser] = {}
        # A template writes the special tokens itself; the default one leaves them to the tokenizer.
        special = body.add_special_tokens
        special = not template if special is None else special
        return [generate_pb2.GenerateRequest(text=text, add_special_tokens=special)]

    def _thoughts(self, prompt: str) -> Thinking:
        """Whether the output begins with thoughts. A constraint leaves no room for them."""
        end = prompt.rstrip()
        if not thinks(self.model.chat_template) or self.body.constraint() is not None:
            return "no"
        if end.endswith("</think>"):
            return "no"
        return "yes" if end.endswith("<think>") else "maybe"

    def sampling(self, seed: int) -> Body:
        values = super().sampling(seed)
        if self._tools is not None:
            found = self.body.constraint()
            if found is not None:
                raise InvalidArgument("tools", "set", f"nothing beside {found[0]}")
            values["grammar"] = self._tools.grammar(self._thinking, self._marker_id)
            if self._marker_id is not None:
                values["skip_special_tokens"] = False
            CONSTRAINT_BYTES.check(len(values["grammar"]), "tools")
        return values

    @property
    def keys(self) -> dict[str, str]:
        return {**super().keys, **({"grammar": "tools"} if self._tools is not None else {})}

    def deltas(self, choice: AnswerChoice, text: str) -> list[Delta]:
        """What a piece of text, the last one if the choice has ended, adds to the message."""
        if choice.index not in self._parsers:
            self._parsers[choice.index] = OutputParser(self._tools, self._thinking)
        parser = self._parsers[choice.index]
        found = parser.push(text) + (parser.close() if choice.last is not None else [])
        if self.body.include_reasoning is False:
            found = [delta for delta in found if "reasoning_content" not in delta]
        return found

    def opening(self) -> Iterable[Body]:
        return [
            self.chunk([self._delta(choice, {"role": "assistant", "content": ""})])
            for choice in self.choices
        ]

    def whole(self, choice: AnswerChoice) -> Body:
        found = merged(self.deltas(choice, choice.text))
        message: Body = {"role": "assistant", "content": found.get("content"), "refusal": None}
        if "reasoning_content" in found:
            message["reasoning_content"] = found["reasoning_content"]
        if "tool_calls" in found:
            calls = found["tool_calls"]
            message["tool_calls"] = [{k: call[k] for k in call if k != "index"} for call in calls]
        elif message["content"] is None:
            message["content"] = ""
        body = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            **self._end(choice),
        }
        if self.body.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def closing(self) -> Body:
        closing = super().closing()
        if self.body.prompt_logprobs is not None:
            closing["prompt_logprobs"] = self.prompt_logprobs(self.choices[0])
        return closing

    def piece(self, choice: AnswerChoice, reply: generate_pb2.GenerateReply) -> Body:
        body = self._delta(choice, merged(self.deltas(choice, reply.text)))
        body["logprobs"] = self._logprobs(reply.logprobs)
        if self.body.return_token_ids:
            body["token_ids"] = list(reply.token_ids)
        return body

    def _delta(self, choice: AnswerChoice, delta: Body) -> Body:
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            **self._end(choice),
        }

    def _end(self, choice: AnswerChoice) -> Body:
        """Why the choice has ended. Calls are a reason unless the request names the function."""
        end, parser = choice.end, self._parsers.get(choice.index)
        called = parser is not None and parser.num_calls > 0
        if end["finish_reason"] == "stop" and called and self._tools and not self._tools.named:
            end["finish_reason"] = "tool_calls"
        return end

    def _logprobs(self, entries: Iterable[generate_pb2.TokenLogprobs]) -> Body | None:
        if not self.body.logprobs:
            return None
        content = [
            {**self._token(entry), "top_logprobs": [self._token(other) for other in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, entry: TokenEntry) -> Body:
        return {
            "token": self.token_name(entry), "logprob": entry.logprob, "bytes": list(entry.text),
        }  # fmt: skip


def chat_prompt(body: ChatLike, model: generate_pb2.Model) -> str:
    """The text of a conversation, as the model's chat template writes it."""
    plain = [message.plain(f"messages[{i}]") for i, message in enumerate(body.messages)]
    used = body.tools if body.tool_choice != "none" else ()
    messages, tools = prompt_messages(plain, used or (), model.chat_template)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return render_chat(
        model.chat_template,
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        tools=tools,
        bos_token=model.bos_token,
        eos_token=model.eos_token,
        **variables,
    )


def token_name_of(text: bytes) -> str:
    """A token's name: its text, or its bytes if they are no text by themselves."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
