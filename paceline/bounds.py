"""What one request may hold at most: one table, for gRPC, HTTP and the library.

A service checks a count or a length against it before it reads what it counts, so that a request
that is refused costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Bound:
    """One line of the table.

    Attributes:
        field: as requests name it.
        most: how much is allowed.
        unit: what is counted.
    """

    field: str
    most: int
    unit: str

    def check(self, size: int, field: str = "") -> None:
        """Refuse more than that.

        Args:
            field: its name in this request, where that is another one.

        Raises:
            InvalidArgument: names the field, the size and the bound.
        """
        if size > self.most:
            raise InvalidArgument(
                field or self.field, f"{size} {self.unit}", f"at most {self.most} {self.unit}"
            )


def request_bytes(context_length: int) -> Bound:
    """Of a whole request to a model with that context: what is longer is not even read."""
    return Bound("message", 262_144 + 256 * context_length, "bytes")


STOP_STRINGS = Bound("stop", 64, "strings")
STOP_BYTES = Bound("stop", 4096, "bytes, all strings together")
STOP_TOKEN_IDS = Bound("stop_token_ids", 1024, "token ids")
ALLOWED_TOKEN_IDS = Bound("allowed_token_ids", 16_384, "token ids")
LOGIT_BIASES = Bound("logit_bias", 1024, "entries")
CONSTRAINT_BYTES = Bound("json_schema, regex or grammar", 65_536, "bytes")
CONSTRAINT_RULES = Bound("json_schema, regex or grammar", 1000, "rules or references")
CONSTRAINT_DEPTH = Bound("json_schema, regex or grammar", 64, "levels of brackets")
CONSTRAINT_REPEATS = Bound(
    "json_schema, regex or grammar", 10_000, "repetitions, those of nested ones multiplied"
)
CONTINUATIONS = Bound("continuations", 256, "sequences")
CONTINUATION_TOKENS = Bound("continuations", 16_384, "token ids, all sequences together")
STATES_LAYERS = Bound("states.layers", 1024, "layers")
TEMPLATE_VARIABLES = Bound("chat_template_kwargs", 64, "keys")
SPECULATION_LIST = Bound("speculation, each list", 4096, "entries")
SPECULATION_TEXT = Bound("speculation, each text", 65_536, "characters")

BOUNDS = (
    STOP_STRINGS, STOP_BYTES, STOP_TOKEN_IDS, ALLOWED_TOKEN_IDS, LOGIT_BIASES,
    CONSTRAINT_BYTES, CONSTRAINT_RULES, CONSTRAINT_DEPTH, CONSTRAINT_REPEATS,
    CONTINUATIONS, CONTINUATION_TOKENS, STATES_LAYERS, TEMPLATE_VARIABLES, SPECULATION_LIST,
    SPECULATION_TEXT,
)  # fmt: skip

LONGEST_TOKEN = 16
"""Bytes. A tokenizer whose longest token is shorter counts as one that has one of this length."""

BY_THE_MODEL = (
    ("prompt, committed and predicted token ids", "as many as the context has"),
    (
        "prompt and predicted text",
        "as many characters as the context has tokens, times the bytes of the longest token "
        f"(at least {LONGEST_TOKEN})",
    ),
    (
        "a whole request (Generate, Open)",
        "256 kB, and 256 bytes for each token of the context; longer ones are not read",
    ),
    ("nodes of a draft", "`max_nodes` of the limits"),
    ("a message or an HTTP body", "`max_message_bytes` of the limits (HTTP: 413)"),
)  # fmt: skip
"""Bounds that depend on the model or the configuration, in words."""


def table() -> str:
    """All bounds as a Markdown table."""
    lines = ["| field | at most |", "|---|---|"]
    lines += [f"| {bound.field} | {bound.most:,} {bound.unit} |" for bound in BOUNDS]
    lines += [f"| {field} | {most} |" for field, most in BY_THE_MODEL]
    return "\n".join(lines) + "\n"
