"""The command line: `paceline --help`.

This module only defines commands and their options. Torch, Ray and gRPC are imported inside the
commands that need them, so that `--help` is instant and a plain install has all local commands.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from cluster.cli_output import (
    DEBUG_VARIABLE,
    Command,
    err,
    out,
    print_error,
    print_json,
    require,
)

app = typer.Typer(
    name="paceline",
    help="Draft-then-verify decoding for language models: exact, and measured.",
    epilog="Start with `paceline doctor`, then `paceline generate 'def fibonacci(n):'`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_command = partial(app.command, cls=Command)

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to standard output, nothing else.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"paceline {version('paceline')}")
        except PackageNotFoundError:
            typer.echo("paceline (run from a source tree that is not installed)")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors.", envvar=DEBUG_VARIABLE)
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version."),
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"  # for processes that a command starts, too
    else:
        os.environ.pop(DEBUG_VARIABLE, None)


# --- one machine, one process ---------------------------------------------------------------------


@_command()
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to go on from; `-` reads it from stdin.")
    ],
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "-m", metavar="NAME",
            help="A row of `paceline methods`. Default: draft_model, or prompt_lookup when "
            "`--target` comes without `--drafter`; with `--server`, what the server prefers.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens to generate at most.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", metavar="T", help="0 is argmax.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(metavar="S", help="Equal seeds give equal tokens, with any method.")
    ] = 0,
    top_k: Annotated[
        int, typer.Option(metavar="K", help="Keep the K most likely tokens; 0 keeps all.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Keep the most likely tokens up to this mass.")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(metavar="P", help="Drop tokens below P times the most likely one's probability."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="R", help="Above 1, tokens that already occur get less likely.")
    ] = 1.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=NUMBER", help="Add NUMBER to a token's logit. Repeatable."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text. Repeatable.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="End after this token. Repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-sequence token.")
    ] = False,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", "-k", metavar="K", help="Depth of a draft; 0 is AR."),
    ] = None,
    speculation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Any other knob of the method, as key=value (repeatable) or one JSON object.",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Target model, a Hugging Face folder. Default: the demo pair."),
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draft model, with the target's tokenizer.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="D", help="float32 (default), bfloat16 or float16."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="D", help="auto (default), cpu, cuda or cuda:N.")
    ] = None,
    batch_invariant: Annotated[
        bool | None,
        typer.Option(
            "--batch-invariant/--no-batch-invariant",
            help="Bit-identical logits whatever is computed beside a token. Default: on for "
            "float32 on a CPU.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Generate on a server, over gRPC, instead of here."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="With `--server`: give up after this time."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate text from a prompt and show which tokens came from the draft.

    Text appears as it is committed: **green** tokens were drafted and accepted, **bold** ones are
    the target's own. The tokens are those of plain autoregressive decoding, whatever the method.

    Examples:

    - `paceline generate 'def fibonacci(n):' --max-tokens 64`
    - `paceline generate 'Once' --method ar -t 0.8 --seed 7 --json`
    - `paceline generate - --method prompt_lookup --speculation ngram_max=4 < code.py`
    - `paceline generate 'Hello' --target ./big --drafter ./small --dtype bfloat16`
    - `paceline generate 'Hello' --server 127.0.0.1:50051`
    """
    from cluster import cli_generate

    request = cli_generate.Request(
        prompt=cli_generate.read_prompt(prompt),
        params=cli_generate.sampling_params(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            logit_bias=logit_bias or (),
            stop=stop or (),
            stop_token_ids=stop_token_id or (),
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
        ),
        speculation=cli_generate.speculation(method, num_speculative_tokens, speculation or ()),
    )
    if server is None:
        run = cli_generate.run_here(
            request,
            target=target,
            drafter=drafter,
            dtype=dtype or "float32",
            device=device or "auto",
            batch_invariant=batch_invariant,
        )
    else:
        cli_generate.refuse_local_options(
            dtype=dtype, device=device, drafter=drafter, batch_invariant=batch_invariant
        )
        require("serve", "grpc")
        run = cli_generate.run_on_server(request, server, timeout=timeout, tokenizer_from=target)
    if as_json:
        print_json(cli_generate.finish(run))
    else:
        cli_generate.show(run)


@_command()
def methods(as_json: Json = False) -> None:
    """List the methods: one row for each paper, with its four parts.

    A method is a drafter, a tree shape, an acceptance rule and a length controller. The last
    column of the table names knobs that `paceline generate --speculation KEY=VALUE` takes.
    """
    from paceline.methods import METHODS

    rows = [method.as_dict() for method in METHODS.values()]
    if as_json:
        print_json(rows)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    for name in ("drafter", "shape", "acceptance", "length"):
        table.add_column(name, no_wrap=True)
    table.add_column("lossless", justify="center")
    table.add_column("what it does; paper; knobs", ratio=1, overflow="fold")
    for row in rows:
        notes = [row["summary"], f"[dim]{row['paper']}[/dim]"]
        if row["needs"]:
            notes.append("needs " + ", ".join(row["needs"]))
        knobs = ", ".join(k if v is None else f"{k}={v}" for k, v in row["knobs"].items())
        table.add_row(
            row["name"],
            row["drafter"],
            row["shape"] or "–",
            row["acceptance"],
            row["length"],
            "yes" if row["lossless"] else "[red]no[/red]",
            "\n".join([*notes, f"[cyan]{knobs}[/cyan]"]),
        )
    out.print(table)


@_command()
def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also start a local Ray and stop it again (20 s).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine, and say how to mend what is wrong.

    Python, packages, torch and the processor, the C kernels, Ray, gRPC, ports, memory, disk, the
    demo models, and whether drafts leave their output unchanged here. Exit code 1 when a check
    fails; a warning is not a failure.
    """
    from cluster.doctor import Status, run_checks

    results = []
    colours = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
    with err.status("checking ...") as status:
        for check, result in run_checks(deep=deep):
            if result is None:
                status.update(f"checking {check} ...")
                continue
            results.append(result)
            if as_json:
                continue
            colour = colours[result.status]
            out.print(
                f"[{colour}]{result.status.value:>4}[/]  [bold]{result.name:<10}[/]",
                end=" ",
                highlight=False,
            )
            out.print(result.detail, markup=False, highlight=False, soft_wrap=True)
            if result.mend:
                out.print(f"{'':17} -> {result.mend}", markup=False, highlight=False, soft_wrap=True)
    failed = [result.name for result in results if result.status is Status.FAIL]
    if as_json:
        print_json({"ok": not failed, "checks": [result.as_dict() for result in results]})
    elif failed:
        print_error(f"failed: {', '.join(failed)}")
    if failed:
        raise typer.Exit(1)


# --- a cluster ------------------------------------------------------------------------------------


@_command()
def demo(
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens for each prompt at most.")
    ] = 96,
    as_json: Json = False,
) -> None:
    """Generate real text through a draft actor and a target actor, and compare with AR.

    Starts a local Ray, deploys one target replica and one drafter replica, sends three prompts
    through the gRPC endpoint, prints the text as it is committed and a table of what the drafts
    brought, and shuts down what it started.
    """
    require("serve", "ray", "grpc")
    from cluster import demo as demo_module

    result = demo_module.run(max_tokens=max_tokens, show=not as_json)
    if as_json:
        print_json(result)


@_command()
def up(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE",
            help="What to deploy (YAML, the same file as for `serve run`). Default: the demo pair "
            "with a drafter and a target in separate actors.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Join this Ray cluster. Default: a local one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start (or join) a Ray cluster and deploy a target, its drafters and the gateway.

    Returns when the gateway answers; everything stays up until `paceline down`.

    Examples:

    - `paceline up`
    - `paceline up --config service.yaml`
    - `paceline generate 'Hello' --server 127.0.0.1:50051`
    """
    require("serve", "ray", "grpc")
    from cluster import local

    result = local.up(config, address=address)
    if as_json:
        print_json(result)


@_command()
def down(as_json: Json = False) -> None:
    """Stop what `paceline up` started. Nothing running is not an error."""
    require("serve", "ray", "grpc")
    from cluster import local

    result = local.down()
    if as_json:
        print_json(result)


@_command()
def status(as_json: Json = False) -> None:
    """Show what is running: replicas, addresses, sessions. Exit code 1 when nothing is."""
    require("serve", "ray", "grpc")
    from cluster import local

    state = local.status()
    if as_json:
        print_json(state)
    else:
        _show_tree(state)
    if not state.get("running"):
        raise typer.Exit(1)


def _show_tree(value: object, indent: int = 0) -> None:
    """Print nested mappings and lists as indented `key: value` lines."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value, 1)  # type: ignore[arg-type]
    for key, item in pairs:
        nested = isinstance(item, dict | list) and bool(item)
        out.print(
            f"{'  ' * indent}{key}:" + ("" if nested else f" {item}"), markup=False, soft_wrap=True
        )
        if nested:
            _show_tree(item, indent + 1)


if __name__ == "__main__":
    app(prog_name="paceline")
