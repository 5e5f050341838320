"""Options that several commands have, each written down once.

The commands give the defaults. An option whose default differs from command to command is made by a
function here, which takes the sentence about it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import InvalidArgument

TOKEN_VARIABLE = "PACELINE_TOKEN"

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to standard output, nothing else.")
]

# --- models ---------------------------------------------------------------------------------------

_DTYPES = ("float32", "bfloat16", "float16", "q8_0", "q4_0", "int8", "auto")


def model_option(text: str, *names: str) -> Any:
    """An option for a model: a folder, a GGUF file or a name."""
    return typer.Option(*names, metavar="MODEL", help=text)


def _dtype_option(default: str) -> Any:
    others = ", ".join(dtype for dtype in _DTYPES if dtype != default)
    return typer.Option(
        metavar="D",
        help=f"Dtype of the weights: {default} (default), {others}. `auto` is the checkpoint's.",
        show_default=False,
    )


_TARGET = (
    "Target: a Hugging Face folder, a GGUF file or a name (`paceline models --help`). "
    "Default: the demo's."
)
Target = Annotated[str | None, model_option(_TARGET)]
MeasuredTarget = Annotated[str | None, model_option(_TARGET, "--target", "--model")]
Drafter = Annotated[
    str | None,
    model_option(
        "Draft model with the target's tokenizer: a folder, a GGUF file or a name. Default: the "
        "demo's with the demo target, else none."
    ),
]
Heads = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder that holds a folder for each trained head. Default: the demo's heads, or "
        "`heads` in the target's folder.",
    ),
]
Corpus = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Text that the methods `sam_decoding`, `sam_token_recycling` and `sam_eagle2` copy "
        "from. Repeatable.",
    ),
]
_ADAPTER = "Adapter (LoRA) of the target: a folder in PEFT's format"
Adapter = Annotated[Path | None, typer.Option(metavar="DIR", help=f"{_ADAPTER}.")]
NamedAdapter = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help=f"{_ADAPTER}; with `--server`, the name of one that the server has."
    ),
]
Dtype = Annotated[str | None, _dtype_option("float32")]
ChatDtype = Annotated[str | None, _dtype_option("auto")]
Device = Annotated[
    str | None,
    typer.Option(metavar="D", help="auto (default), cpu, cuda or cuda:N.", show_default=False),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="CPU threads. Default: 1 for models below 100 MB, else what torch chooses.",
    ),
]
Numerics = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="fastest (default), or portable: logits with the same bits on any processor.",
    ),
]

# --- generating -----------------------------------------------------------------------------------

Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT", help="The text to continue; `-` reads standard input.")
]


def method_option(default: str) -> Any:
    """``--method``; ``default`` is a sentence about the method without this option."""
    return typer.Option(
        "--method", "-m", metavar="NAME", help=f"A method of `paceline methods`. {default}"
    )


NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "-k", "--num-speculative-tokens", metavar="K", help="Speculation length: depth of a draft."
    ),
]
Knobs = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "--speculation",
        metavar="KNOB=VALUE",
        help="Any other knob of the method, `ngram_max=4`; a list is JSON, "
        "`branching_vector=[4,2,1]`. Repeatable. One JSON object sets several knobs.",
    ),
]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Ask the prompt as a question, with the target's chat template."),
]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", "-n", metavar="N", help="Most tokens to generate for a prompt."),
]
Temperature = Annotated[
    float,
    typer.Option("--temperature", "-t", metavar="T", help="0 takes the most likely token."),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="S", help="Seed of sampling: equal seeds give equal tokens, with any method."
    ),
]
TopK = Annotated[
    int, typer.Option(metavar="K", help="Sample from the K most likely tokens; 0: from all.")
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="P", help="Sample from the most likely tokens whose probabilities reach P together."
    ),
]
MinP = Annotated[
    float,
    typer.Option(metavar="P", help="Drop tokens less likely than P times the most likely one."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(metavar="R", help="Above 1, tokens that already occur become less likely."),
]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text. Repeatable.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-sequence token.")
]
Repetitions = Annotated[
    int, typer.Option("--repetitions", "-r", metavar="N", help="Runs behind each median.")
]

# --- servers --------------------------------------------------------------------------------------

RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The Ray cluster to use. Default: RAY_ADDRESS, else a local Ray, started for this.",
    ),
]
NumericsMismatch = Annotated[
    str | None,
    typer.Option(
        "--numerics-mismatch",
        metavar="M",
        help="When a server is lost and the next one has other numerics: refuse (default), or "
        "allow, which goes on and reports it.",
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With `--server`: use TLS and trust the authorities in this PEM file; `system` trusts "
        "the public ones.",
    ),
]
Cert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With `--ca`: the client's own certificate (PEM), for mTLS."),
]
Key = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With `--cert`: the certificate's key (PEM).")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With `--server`: file with the tenant's token. Default: the variable "
        f"{TOKEN_VARIABLE}.",
    ),
]


def client_options(
    server: str | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    token_file: Path | None,
) -> dict[str, Any]:
    """How to connect, as keyword arguments of :class:`paceline.rpc.client.Client`.

    Raises:
        InvalidArgument: an option comes without ``--server``, or a file cannot be read.
    """
    given = {"ca": ca, "cert": cert, "key": key}
    if server is None:
        for name, value in {**given, "token_file": token_file}.items():
            if value is not None:
                raise InvalidArgument(name, str(value), "this option together with --server")
        return {}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if token_file is not None:
        try:
            options["token"] = token_file.expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise InvalidArgument("token_file", str(token_file), f"a file ({reason})") from None
    elif os.environ.get(TOKEN_VARIABLE):
        options["token"] = os.environ[TOKEN_VARIABLE].strip()
    return options
