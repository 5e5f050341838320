"""Turns a conversation into a prompt with the chat template of the target's tokenizer.

Templates run in Jinja's sandbox, with the names that ``transformers`` provides: ``messages``,
``add_generation_prompt``, ``bos_token``, ``eos_token``, ``raise_exception``, ``strftime_now``,
``tojson``, loop controls and the tag ``generation``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from paceline.errors import InvalidArgument
from paceline.tokenizer import ChatTemplate, Tokenizer, chat_template

DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt -%}
Assistant:
{%- endif -%}
"""
"""For models without a chat template: one line for each message, then ``Assistant:``."""


RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "source")
)
"""Variables of a template that a request cannot set by their names."""


def template_of(target: str | Path, chat: bool | None) -> ChatTemplate | None:
    """The template that texts for a target go through; None: they stay as they are.

    Args:
        target: its folder or GGUF file.
        chat: None: where the target has a template. True without one: the default template.

    Raises:
        ModelNotFound: there is no such folder or file.
    """
    if chat is False:
        return None
    found = chat_template(target)
    return found if found.source or chat else None


def render_chat(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The prompt of a conversation.

    Args:
        source: the template's text; empty takes :data:`DEFAULT_TEMPLATE`.
        tools: for templates that read them (:func:`reads_tools`).
        variables: further variables that the template may use.

    Raises:
        InvalidArgument: the template refuses the messages, or fails.
    """
    try:
        return _compiled(source or DEFAULT_TEMPLATE).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except Exception as error:  # a template may raise anything on messages that it does not expect
        reason = str(error) or type(error).__name__
        raise InvalidArgument(
            "messages", [message.get("role") for message in messages],
            f"a conversation that the model's chat template takes ({reason})",
        ) from None  # fmt: skip


def conversation(turns: Sequence[str], answers: Sequence[str] = ()) -> list[dict[str, str]]:
    """The messages of a conversation in which the next answer is the model's.

    Args:
        turns: what the user says.
        answers: the model's answers to all but the last of them.
    """
    messages = []
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if number < len(turns) - 1:
            messages.append({"role": "assistant", "content": answers[number]})
    return messages


def encode_prompt(tokenizer: Tokenizer, template: ChatTemplate | None, text: str) -> list[int]:
    """Token ids of a prompt: of the text itself, or with a template of the question ``text``."""
    if template is None:
        return tokenizer.encode(text)
    return encode_chat(tokenizer, template, conversation([text]))


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Token ids of a conversation, up to where the model's answer begins.

    Raises:
        InvalidArgument: the template refuses the messages, or fails.
    """
    text = render_chat(
        template.source, messages, bos_token=template.bos_token, eos_token=template.eos_token
    )
    # A template writes the special tokens itself; the default one leaves them to the tokenizer.
    return tokenizer.encode(text, add_special_tokens=not template.source)


class _Generation(jinja2.ext.Extension):
    """Ignores the tag ``{% generation %}``, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def reads_tools(source: str) -> bool:
    """Whether a template reads ``tools``; False for one that is no template."""
    try:
        parsed = _environment().parse(source or DEFAULT_TEMPLATE)
    except jinja2.TemplateError:
        return False
    return "tools" in jinja2.meta.find_undeclared_variables(parsed)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes HTML


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
