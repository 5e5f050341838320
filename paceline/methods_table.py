"""The catalogue as a document: ``python -m paceline.methods_table`` writes docs/methods.md.

``--check`` writes nothing and fails if the file does not match the catalogue.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.config import SpeculationConfig
from paceline.methods import (
    ACCEPTANCE_RULES,
    COMMON_KNOBS,
    DIFFUSION_METHODS,
    DRAFTER_PARTS,
    KNOBS,
    LENGTHS,
    METHODS,
    SHAPES,
    VLLM_METHODS,
    Method,
)
from paceline.plan import resolve

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "methods.md"

_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
_GITHUB = re.compile(r"(?<![\w/])github\.com/[\w.-]+/[\w.-]+")

_INTRODUCTION = """\
# Methods

<!-- Written by `python -m paceline.methods_table` from the catalogue; do not edit. -->

A method combines a drafter, a tree shape, an acceptance rule and a length controller, and has
knobs. The same names and knobs work everywhere, and are checked before anything runs:

| where | how |
|---|---|
| library | `SpeculationConfig(method="prompt_lookup", ngram_max=4)` |
| command line | `paceline generate PROMPT --method prompt_lookup --set ngram_max=4` |
| gRPC | the field `speculation` of a request, or `Client.complete(prompt, params, config)` |
| benchmark | `paceline bench --methods prompt_lookup:ngram_max=4` |
| deployment | the block `speculation` of the YAML file, for requests that name no method or knobs |

A list is written as JSON: `--set 'name=["a", "b"]'`.

**Lossless** methods give the target's own tokens at temperature 0. Above it, methods with the rule
`coupled` give exactly the tokens of plain autoregressive decoding with the same seed (**AR's
tokens**); the others keep its distribution. Methods that can change the output (**lossy**) require
`allow_lossy: true`. **Needs** lists what the drafter needs from the target beyond committed tokens.

**Drafts** says where the drafter can be: **anywhere**, that is beside the target, in drafter
replicas (topology `actors`) and on a device; anywhere **with states**, which the target sends it
([protocol.md](protocol.md#states-for-heads)); or only **beside the target**, because it reads more.
"""


def knobs_of(method: Method) -> dict[str, Any]:
    """The knobs of a method beside the common ones, with the values that it uses by default."""
    given = SpeculationConfig(method=method.name, allow_lossy=not method.lossless)
    config = resolve(given).config
    # A knob of the default shape, rule and controller; the others of those stand with the parts.
    names = (config.overrides().keys() | method.knob_defaults.keys()) - COMMON_KNOBS
    fields = SpeculationConfig.model_fields
    return {name: getattr(config, name) for name in fields if name in names}


def markdown() -> str:
    """The whole document, ending with a newline."""
    blocks = [_INTRODUCTION, *_overview(), *_methods(), *_knobs(), *_parts(), *_searched()]
    return "\n".join(blocks).rstrip("\n") + "\n"


def _overview() -> Iterator[str]:
    yield "## All methods\n"
    yield _table(
        ("method", "drafter", "shape", "acceptance", "length", "output", "needs", "drafts"),
        (
            (
                f"[`{m.name}`](#{m.name})",
                ", ".join(f"`{name}`" for name in (m.drafter, *m.uses)),
                f"`{m.shape}`" if m.shape else "–",
                f"`{m.acceptance}`",
                f"`{m.length}`",
                _promise(m),
                ", ".join(sorted(f"`{need.value}`" for need in m.needs)) or "–",
                _place(m),
            )
            for m in METHODS.values()
        ),
    )
    yield "## Methods of vLLM\n"
    yield "With `engine: vllm` in a deployment, one of these drafts chains inside vLLM for all"
    yield "requests. Methods above whose drafter needs only tokens run there too, and each request"
    yield "chooses its own.\n"
    yield _table(
        ("method", "what it does", "paper", "its knobs"),
        (
            (f"`{m.name}`", m.summary, _linked(m.paper), _with_defaults(_set(m.defaults)))
            for m in VLLM_METHODS.values()
        ),
    )
    yield "## Schedules of a masked-diffusion model\n"
    yield "With `engine: diffusion` in a deployment ([how](diffusion.md#serving)), a method is a"
    yield "schedule of the denoise loop. Those that are lossy write another text than `static`.\n"
    yield _table(
        ("method", "what it does", "paper", "output"),
        (
            (
                f"`{m.name}`", m.summary, _linked(m.paper),
                "the text of `static`" if m.lossless else "lossy",
            )
            for m in DIFFUSION_METHODS.values()
        ),
    )  # fmt: skip
    yield _table(
        ("knob", "default", "meaning"),
        (
            (f"`{knob.name}`", _shown(knob.default), _meaning(knob.name))
            for knob in DRAFTER_PARTS["denoising"].knobs
        ),
    )


def _set(knobs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in knobs.items() if value is not None}


def _place(method: Method) -> str:
    """Where a method's drafter can be."""
    if method.drafter == "none":
        return "–"
    if method.reads_constraint or (method.needs and method.uses):
        return "beside the target"
    if not method.needs:
        return "anywhere"
    sent = DRAFTER_PARTS[method.drafter].reads_sent_states
    return "with states" if sent else "beside the target"


def _promise(method: Method) -> str:
    if not method.lossless:
        return "lossy"
    return "AR's tokens" if method.acceptance == "coupled" else "lossless"


def _methods() -> Iterator[str]:
    yield "## The methods\n"
    for method in METHODS.values():
        yield f"### {method.name}\n"
        yield f"{method.summary}\n"
        yield f"Paper: {_linked(method.paper)}\n"
        knobs = knobs_of(method)
        if knobs:
            yield _table(
                ("knob", "default", "meaning"),
                ((f"`{name}`", _shown(value), _meaning(name)) for name, value in knobs.items()),
            )


def _knobs() -> Iterator[str]:
    yield "## Knobs of every method\n"
    yield _table(
        ("knob", "default", "meaning"),
        (
            (
                f"`{name}`",
                _shown(field.default) if name in ("method", "allow_lossy") else "the method's",
                _meaning(name),
            )
            for name, field in SpeculationConfig.model_fields.items()
            if name in COMMON_KNOBS
        ),
    )


def _parts() -> Iterator[str]:
    yield "## Parts to choose from\n"
    yield "A method with a shape can use another shape, and every method can use any rule and"
    yield "controller that fits. Each part has knobs:\n"
    tables = (("shape", SHAPES), ("acceptance", ACCEPTANCE_RULES), ("length", LENGTHS))
    for part, known in tables:
        rows = (
            (f"`{name}`", _with_defaults({knob.name: knob.default for knob in known[name].knobs}))
            for name in sorted(known)
        )
        yield _table((f"`{part}`", "its knobs"), rows)


def _searched() -> Iterator[str]:
    yield "## What a sweep tries by itself\n"
    yield "A field of a sweep's `space` may have the value `auto`; it then stands for these values"
    yield "([tuning](tuning.md)). A sweep varies other knobs over the values that its file lists.\n"
    yield _table(
        ("knob", "values for `auto`"),
        (
            (f"`{knob.name}`", ", ".join(map(_shown, knob.search)))
            for knob in KNOBS.values()
            if knob.search
        ),
    )


def _with_defaults(knobs: Mapping[str, Any]) -> str:
    shown = (f"`{k}`" if v is None else f"`{k}` = {_shown(v)}" for k, v in knobs.items())
    return ", ".join(shown) or "–"


def _meaning(knob: str) -> str:
    field = SpeculationConfig.model_fields[knob]
    return f"{field.description} {bounds_in_words(field.metadata)}".strip()


def bounds_in_words(metadata: Iterable[Any]) -> str:
    """The bounds in pydantic's annotations, in words: "At least 0, at most 64."."""
    forms = {
        "ge": "at least {}",
        "gt": "above {}",
        "le": "at most {}",
        "lt": "below {}",
        "min_length": "{} or more values",
        "max_length": "at most {} values",
    }
    found = [
        form.format(getattr(item, key))
        for item in metadata
        for key, form in forms.items()
        if getattr(item, key, None) is not None
    ]
    return ", ".join(found).capitalize() + "." if found else ""


def _shown(value: Any) -> str:
    """A default as JSON writes it, which is what the command line takes."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        inner = ", ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in value)
        return f"`[{inner}]`"
    return f"`{value}`"


def _linked(paper: str) -> str:
    text = _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", paper)
    return _GITHUB.sub(lambda match: f"<https://{match.group().rstrip('.')}>", text)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    head = list(head)
    lines = [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.methods_table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the document is stale")
    text = markdown()
    if parser.parse_args().check:
        if not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != text:
            sys.exit(f"stale {DOCUMENT.name}, run `python -m paceline.methods_table`")
        sys.stdout.write("docs/methods.md is up to date\n")
    else:
        DOCUMENT.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {DOCUMENT}\n")


if __name__ == "__main__":
    main()
