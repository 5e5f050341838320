"""The command line: `paceline --help`.

This module defines the commands. They import torch, Ray and gRPC inside, where they need them, so
that `--help` is instant and a plain install has all local commands.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from paceline.cluster.cli_board import board
from paceline.cluster.cli_chat import chat
from paceline.cluster.cli_diffuse import diffuse
from paceline.cluster.cli_draft import draft
from paceline.cluster.cli_export import export
from paceline.cluster.cli_infill import infill
from paceline.cluster.cli_models import models
from paceline.cluster.cli_options import (
    Adapter,
    Ca,
    Cert,
    Chat,
    Corpus,
    Device,
    Drafter,
    Dtype,
    Heads,
    IgnoreEos,
    Json,
    Key,
    Knobs,
    MaxTokens,
    MeasuredTarget,
    MinP,
    NamedAdapter,
    Numerics,
    NumericsMismatch,
    NumSpeculativeTokens,
    Prompt,
    RayAddress,
    RepetitionPenalty,
    Repetitions,
    Seed,
    Stop,
    Target,
    Temperature,
    Threads,
    TokenFile,
    TopK,
    TopP,
    client_options,
    method_option,
    model_option,
)
from paceline.cluster.cli_output import (
    DEBUG_VARIABLE,
    EXIT_INTERRUPTED,
    Command,
    err,
    out,
    pinned_model,
    print_error,
    print_json,
    require,
    set_threads,
    show_tree,
)
from paceline.cluster.cli_together import together
from paceline.cluster.cli_train import train
from paceline.errors import InvalidArgument


class Commands(TyperGroup):
    """The commands below, and those of packages that this one must not import.

    Such a package names a Typer app as an entry point of the group ``paceline.commands``. The app
    is imported when its command runs or `--help` lists it, so its module has to be light.
    """

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [*super().list_commands(ctx), *_further_commands()]  # type: ignore[arg-type]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        found = super().get_command(ctx, cmd_name)  # type: ignore[arg-type]
        if found is None and (entry := _further_commands().get(cmd_name)) is not None:
            found = typer.main.get_command(entry.load())
            found.name = cmd_name
        return found


def _further_commands() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="paceline.commands")}


app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Speculative decoding for language models: the exact tokens of the target, sooner.",
    epilog="Start with `paceline doctor`, then `paceline generate 'def fibonacci(n):'`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_command = partial(app.command, cls=Command)


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
        bool, typer.Option("--debug", help="Show the traceback of an error.", envvar=DEBUG_VARIABLE)
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"  # the processes that a command starts read it, too
    else:
        os.environ.pop(DEBUG_VARIABLE, None)


# --- one machine, one process ---------------------------------------------------------------------


@_command()
def generate(
    prompt: Prompt,
    chat: Chat = False,
    method: Annotated[
        str | None,
        method_option(
            "Default: auto, the best of what is loaded in each round; with `--set` or `-k`, "
            "draft_model or prompt_lookup; with `--server`, the server's own."
        ),
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=NUMBER", help="Add NUMBER to the logit of token ID. Repeatable."),
    ] = None,
    stop: Stop = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="End after the token ID. Repeatable.")
    ] = None,
    ignore_eos: IgnoreEos = False,
    num_speculative_tokens: NumSpeculativeTokens = None,
    speculation: Knobs = None,
    prediction: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the text that the output will mostly repeat. It is drafted: where it "
            "is right, generation is faster; where it is wrong, the output is the same.",
        ),
    ] = None,
    target: Target = None,
    drafter: Drafter = None,
    heads: Heads = None,
    corpus: Corpus = None,
    adapter: NamedAdapter = None,
    dtype: Dtype = None,
    device: Device = None,
    drafter_device: Annotated[
        str | None,
        typer.Option(
            metavar="D", help="Device of the draft model and of heads. Default: the target's."
        ),
    ] = None,
    batch_invariant: Annotated[
        bool | None,
        typer.Option(
            "--batch-invariant/--no-batch-invariant",
            help="Logits have the same bits whatever is computed beside them. Default: on for "
            "float32 on a CPU.",
        ),
    ] = None,
    threads: Threads = None,
    numerics: Numerics = None,
    transcript: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write request and output to FILE, for `paceline verify`."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Generate on this server, over gRPC, instead of here."
        ),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenFile = None,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="With `--server`: seconds for the whole generation."),
    ] = 600.0,
    numerics_mismatch: NumericsMismatch = None,
    as_json: Json = False,
) -> None:
    """Generate text from a prompt and show which tokens were drafted.

    Text appears as it is committed: **green** tokens were drafted and accepted, **bold** ones are
    the target's own. Whatever the method, the tokens are those of plain autoregressive decoding.

    Examples:

    - `paceline generate 'def fibonacci(n):' --max-tokens 64`
    - `paceline generate 'Once' --method ar -t 0.8 --seed 7 --json`
    - `paceline generate - --method prompt_lookup --set ngram_max=4 < code.py`
    - `paceline generate - --prediction code.py < instruction-and-code.txt`
    - `paceline generate 'Hello' --target ./big --drafter ./small --dtype bfloat16`
    - `paceline generate 'Hello' --target Qwen/Qwen3-1.7B --drafter Qwen/Qwen3-0.6B`
    - `paceline generate 'class Stack:' --method sam_eagle2 --corpus code.py`
    - `paceline generate 'What is a prime number?' --chat --target smollm2 --dtype auto`
    - `paceline generate 'Hello' --target ./big --adapter ./big-lora`
    - `paceline generate 'Hello' --server 127.0.0.1:50051`
    - `paceline generate 'Hello' --numerics portable --transcript hello.json`
    """
    from paceline.cluster import cli_generate

    request = cli_generate.GenerateOptions(
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
        prediction="" if prediction is None else cli_generate.read_text("prediction", prediction),
        chat=chat,
        adapter=adapter or "",
    )
    connection = client_options(server, ca, cert, key, token_file)
    if server is None:
        if numerics_mismatch is not None:
            raise InvalidArgument(
                "numerics_mismatch", numerics_mismatch, "this option together with --server"
            )
        run = cli_generate.run_here(
            request,
            target=target,
            drafter=drafter,
            heads=heads,
            corpus=corpus or (),
            dtype=dtype or "float32",
            device=device or "auto",
            drafter_device=drafter_device,
            batch_invariant=batch_invariant,
            threads=threads,
            numerics=numerics or "fastest",
            transcript=transcript,
            with_fingerprint=as_json,
        )
    else:
        cli_generate.refuse_local_options(
            dtype=dtype,
            device=device,
            drafter_device=drafter_device,
            drafter=drafter,
            heads=heads,
            corpus=corpus,
            batch_invariant=batch_invariant,
            threads=threads,
            numerics=numerics,
            chat=chat or None,
        )
        require("serve", "grpc")
        run = cli_generate.run_on_server(
            request,
            server,
            timeout=timeout,
            tokenizer_from=target,
            client_options=connection,
            transcript=transcript,
            numerics_mismatch=numerics_mismatch,
        )
    if as_json:
        result = cli_generate.finish(run)
        print_json(result)
        cli_generate.show_note(result)
    else:
        cli_generate.show(run)


_command()(draft)
_command()(diffuse)
_command()(infill)
_command()(chat)


@_command()
def verify(
    transcript: Annotated[
        Path,
        typer.Argument(
            metavar="TRANSCRIPT.json", help="File that `paceline generate --transcript` wrote."
        ),
    ],
    target: Annotated[
        str | None,
        model_option(
            "The model that wrote it: a folder or a name. Default: the folder that the transcript "
            "names, else the demo's."
        ),
    ] = None,
    device: Device = None,
    threads: Threads = None,
    numerics_mismatch: Annotated[
        str,
        typer.Option(
            "--numerics-mismatch",
            metavar="M",
            help="When this machine's numerics are not those of the transcript: refuse, or allow, "
            "which compares anyway.",
        ),
    ] = "refuse",
    as_json: Json = False,
) -> None:
    """Verify a transcript: check token by token that this model writes what the server wrote.

    Exit code 0 if all tokens are the model's, 1 with the first position that differs, 2 if the
    transcript cannot be verified here: it is damaged, or of another model or other numerics.
    Transcripts of the numerics class `portable` can be verified on any machine.

    Examples:

    - `paceline generate 'Once' -t 0.8 --seed 7 --transcript once.json --server 127.0.0.1:50051`
    - `paceline verify once.json`
    """
    from paceline.cluster import cli_verify

    result = cli_verify.run(
        transcript,
        target=target,
        device=device or "auto",
        threads=threads,
        numerics_mismatch=numerics_mismatch,
    )
    if as_json:
        print_json(result)
    else:
        cli_verify.show(result)
    if not result["verified"]:
        raise typer.Exit(1)


@_command()
def methods(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/methods.md instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the methods, each with its paper, its four parts and its knobs.

    A method consists of a drafter, a shape, an acceptance rule and a length controller. `paceline
    generate --set KNOB=VALUE` sets its knobs.
    """
    from paceline.methods import DIFFUSION_METHODS, METHODS, VLLM_METHODS

    if markdown:
        from paceline.methods_table import markdown as render

        sys.stdout.write(render())
        return
    listed = {**METHODS, **VLLM_METHODS, **DIFFUSION_METHODS}
    entries = [method.as_dict() for method in listed.values()]
    if as_json:
        print_json(entries)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="underline")
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("drafter", no_wrap=True)
    for column in ("shape", "acceptance", "lossless"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(
            entry["name"],
            entry["drafter"]
            + ("" if entry["engine"] == "paceline" else f" (engine: {entry['engine']})"),
            entry["shape"] or "–",
            entry["acceptance"],
            "yes" if entry["lossless"] else "[red]no[/red]",
        )
    out.print(table)
    out.print()
    for entry in entries:
        knobs = ", ".join(
            k if v is None else f"{k}={json.dumps(v)}" for k, v in entry["knobs"].items()
        )
        out.print(Text.assemble((entry["name"], "bold"), f"  {entry['summary']}"))
        parts = f"length: {entry['length']}; needs: {', '.join(entry['needs']) or 'nothing'}"
        for line, style in ((entry["paper"], "dim"), (parts, "dim"), (f"knobs: {knobs}", "cyan")):
            out.print(Padding(Text(line, style), (0, 0, 0, 4)))


app.add_typer(models, name="models")


@_command()
def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also start and stop a local Ray (20 s).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine, and say how to repair what is wrong.

    It checks Python, packages, torch and the processor, the C kernels, Ray, gRPC, ports, memory,
    disk and the demo models, and that drafts do not change the output here. Exit code 1 if a check
    fails; a warning is not a failure.
    """
    from paceline.cluster.doctor import Status, run_checks

    set_threads(None, None)
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
                mend = f"{'':17} -> {result.mend}"
                out.print(mend, markup=False, highlight=False, soft_wrap=True)
    failed = [result.name for result in results if result.status is Status.FAIL]
    if as_json:
        print_json({"ok": not failed, "checks": [result.as_dict() for result in results]})
    elif failed:
        print_error(f"failed: {', '.join(failed)}")
    if failed:
        raise typer.Exit(1)


@_command()
def bench(
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, in Spec-Bench's JSONL format unless `--suite` names another. Default: "
            "the built-in prompts.",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Format of the file of `--prompts`: spec-bench, mt-bench, gsm8k, humaneval, "
            "speed-bench or sharegpt. The file is yours; none ships with Paceline.",
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="`all`, or methods separated by commas, each with its knobs after "
            "colons: `draft_model:num_speculative_tokens=6,prompt_lookup`. AR is always measured.",
        ),
    ] = "all",
    allow_lossy: Annotated[
        bool,
        typer.Option("--allow-lossy", help="Also measure methods that can change the output."),
    ] = False,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="Also measure drafts made up from AR's answers, each token right with this "
            "probability: what a drafter as good would gain. Shown as `synthetic(RATE, K)`.",
        ),
    ] = None,
    synthetic_tokens: Annotated[
        int, typer.Option(metavar="K", help="Tokens of each draft of `--synthetic-acceptance`.")
    ] = 4,
    batch: Annotated[
        int, typer.Option("--batch", "-b", metavar="N", help="Prompts that are generated together.")
    ] = 1,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    repetitions: Repetitions = 3,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Most prompts of each category.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Ask the prompts as questions, with the target's chat template and all turns. "
            "Default: with `--prompts` and a target that has a template, unless `--peers`.",
        ),
    ] = None,
    peers: Annotated[
        bool | None,
        typer.Option(
            "--peers/--no-peers",
            help="Also measure transformers' own generate with the same weights. Default: at "
            "temperature 0, without chat, and with a named dtype.",
        ),
    ] = None,
    batch_invariant: Annotated[
        str,
        typer.Option(metavar="MODE", help="auto, on, off, or both, which compares them."),
    ] = "auto",
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Also measure a deployment of the same target (`paceline up`).",
        ),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    token_file: TokenFile = None,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="colocated (in this process), actors (at `--server`, else on a local Ray, started "
            "for this), or both. Default: colocated; both with `--server`.",
        ),
    ] = None,
    target: MeasuredTarget = None,
    drafter: Drafter = None,
    heads: Heads = None,
    adapter: Adapter = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    threads: Threads = None,
    numerics: Numerics = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a page with plots, which needs no network."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the measurements as CSV.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the speedup of methods over AR: the same prompts, interleaved in one process.

    A speedup is the median of paired ratios: the same prompts in the same repetition. The table
    shows its spread, and whether the tokens of every prompt are those of AR. After Ctrl-C the
    table is of what was measured by then.

    Examples:

    - `paceline bench --limit 2`
    - `paceline bench --methods draft_model,prompt_lookup --batch 8 --json`
    - `paceline bench --prompts questions.jsonl --target ./big --drafter ./small`
    - `paceline bench --suite gsm8k --prompts test.jsonl --target smollm2 --limit 8`
    - `paceline bench --prompts questions.jsonl --target smollm2 --dtype auto --limit 2`
    - `paceline bench --topology both --methods draft_model`
    - `paceline bench --methods ar --synthetic-acceptance 0.8 --batch 8`
    - `paceline bench --html bench.html --csv bench.csv --json > bench.json`
    """
    with err.status("loading torch ..."):
        from paceline.bench import BenchOptions, render_csv, render_page, render_table
        from paceline.cluster import cli_bench

    for name, file in (("html", html), ("csv", csv)):  # before minutes of measuring
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise InvalidArgument(name, str(file), "a file in a folder that exists")
    target, drafter = pinned_model(target), pinned_model(drafter)
    set_threads(threads, target)
    options = BenchOptions(
        target=target,
        drafter=drafter,
        heads=heads,
        adapter=adapter,
        prompts=prompts,
        suite=suite,
        chat=chat,
        methods=methods,
        batch=batch,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        repetitions=repetitions,
        limit=limit,
        peers=peers,
        batch_invariant=batch_invariant,
        topology=topology or ("colocated" if server is None else "both"),
        allow_lossy=allow_lossy,
        dtype=dtype,
        device=device,
        numerics=numerics or "fastest",
        synthetic_acceptance=synthetic_acceptance,
        synthetic_tokens=synthetic_tokens,
    )
    if options.topology != "colocated":
        require("serve", "ray", "grpc")
    result = cli_bench.run(options, server, client_options(server, ca, cert, key, token_file))
    if html is not None:
        html.write_text(render_page(result, shlex.join(["paceline", *sys.argv[1:]])), "utf-8")
    if csv is not None:
        csv.write_text(render_csv(result), "utf-8")
    if as_json:
        print_json(result)
    else:
        render_table(result, out)
    if result["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)


app.add_typer(board, name="board")


@_command()
def profile(
    target: Target = None,
    drafter: Drafter = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Also measure the round trip to this drafter, over gRPC."
        ),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File of the profile. Default: one in the user's cache directory.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the costs into a .png, .svg or .pdf.")
    ] = None,
    repetitions: Repetitions = 5,
    dtype: Dtype = "float32",
    device: Device = "auto",
    threads: Threads = None,
    numerics: Numerics = None,
    as_json: Json = False,
) -> None:
    """Measure what drafting and verifying cost on this machine, for the controller `goodput`.

    Later runs with the same models on this machine find the profile by themselves, unless `--out`
    writes it elsewhere.
    """
    with err.status("loading torch ..."):
        from dataclasses import asdict

        from paceline.cluster import cli_profile

    if server is not None:
        require("serve", "grpc")
    set_threads(threads, target)
    result = cli_profile.run(
        target,
        drafter,
        server=server,
        client_options=client_options(server, ca, cert, key, None),
        dtype=dtype,
        device=device,
        numerics=numerics or "fastest",
        repetitions=repetitions,
        file=file,
        plot_file=plot,
    )
    if as_json:
        print_json({**result, "profile": asdict(result["profile"])})
    else:
        cli_profile.show(result["file"], result["profile"])


app.add_typer(train, name="train")
app.add_typer(together, name="together")
_command()(export)


# --- a cluster ------------------------------------------------------------------------------------


@_command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="smollm2, a chat model of 93 MB, or demo, the pair that ships. Default: smollm2, "
            "unless it cannot be downloaded.",
        ),
    ] = None,
    max_tokens: MaxTokens = 96,
    length: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Length controller of the demo pair's method; `fixed` drafts on any machine. "
            "Default: the method's own, which drafts only while that is faster.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate with drafts on a local cluster, and compare with AR.

    Starts a local Ray, deploys a target (smollm2: with its drafters; demo: and a drafter in an
    actor of its own), sends some prompts (smollm2: a question, a function to write, a text to
    summarise, one to correct) through the gRPC endpoint, prints the text as it is committed and a
    table of speeds, from the first token on, and acceptance, and stops what it started. Exit code 1
    if the tokens are not those of AR.
    """
    require("serve", "ray", "grpc")
    from paceline.cluster import demo as demo_module

    result = demo_module.run(max_tokens, model=model, length=length, show=not as_json)
    if as_json:
        print_json(result)
    if not result["identical_to_ar"]:
        raise typer.Exit(1)


@_command()
def up(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="What to deploy: a YAML file, as for `serve run`. Default: SmolLM2, or the demo "
            "pair if it cannot be downloaded, with drafter and target in separate actors.",
        ),
    ] = None,
    address: RayAddress = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="P", help="The gateway's port for gRPC, instead of the config's."),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            metavar="P", help="The gateway's port for HTTP, instead of the config's; 0: a free one."
        ),
    ] = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run until Ctrl-C, then stop the deployment.")
    ] = False,
    observability: Annotated[
        bool,
        typer.Option(
            "--observability",
            help="Write a Prometheus scrape config and the Grafana dashboard, and print where.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Start or join a Ray cluster and deploy a target, its drafters and the gateway.

    Returns when the gateway answers; the deployment runs until `paceline down`. The gateway listens
    on loopback unless the config says otherwise. A Ray that this starts takes jobs, too, behind a
    token: `up` names a file, with which a shell finds it (`ray job submit`, `serve status`).

    Examples:

    - `paceline up`
    - `paceline up --config service.yaml`
    - `paceline generate 'Hello' --server 127.0.0.1:50051`
    - `curl http://127.0.0.1:8000/v1/models`
    """
    require("serve", "ray", "grpc")
    from paceline.cluster import local

    result = local.up(
        config,
        address=address,
        port=port,
        http_port=http_port,
        detach=not foreground,
        observability=observability,
    )
    if as_json:
        print_json(result)


@_command()
def down(as_json: Json = False) -> None:
    """Stop what `paceline up` started; it is no error if nothing runs."""
    require("serve", "ray", "grpc")
    from paceline.cluster import local

    result = local.down()
    if as_json:
        print_json(result)
    elif result["stopped"]:
        at = f" at {result['gateway']}" if result["gateway"] else " that was starting"
        out.print(f"stopped the deployment{at}", highlight=False)
    else:
        out.print("nothing was running")


@_command()
def status(as_json: Json = False) -> None:
    """Show the replicas that run, their addresses and sessions. Exit code 1 if nothing runs."""
    require("serve", "ray", "grpc")
    from paceline.cluster import local

    state = local.status()
    if as_json:
        print_json(state)
    elif state["running"]:
        show_tree(state)
    else:
        out.print("nothing is running: `paceline up` starts a deployment", markup=False)
    if not state["running"]:
        raise typer.Exit(1)


@_command()
def certs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the files; created if needed.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name or IP address at which clients reach the gateway, beside localhost. "
            "Repeatable.",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(metavar="N", help="Days that the certificates are valid.")
    ] = 90,
    as_json: Json = False,
) -> None:
    """Make certificates for trying out TLS: for gateway, client and replicas, with authorities.

    Only their owner can read the keys. Another run keeps the authorities and renews the
    certificates, which running servers read again by themselves. docs/security.md says how to use
    them.

    Example: `paceline certs ./certs --host gateway.example.org`
    """
    require("serve", "cryptography", "grpc")
    from paceline.cluster.certs import make_certificates

    files = make_certificates(folder, host or (), days)
    if as_json:
        print_json({name: str(path) for name, path in files.items()})
        return
    what = {
        "ca.crt": "clients trust it: --ca",
        "server.crt": "gateway.tls.cert",
        "server.key": "gateway.tls.key",
        "client.crt": "--cert, where client certificates are required",
        "client.key": "--key",
        "replica-ca.crt": "data_plane_tls.ca",
        "replica.crt": "data_plane_tls.cert",
        "replica.key": "data_plane_tls.key",
        "ca.key": "signs servers and clients: keep it away from them",
        "replica-ca.key": "signs replicas: keep it away from them",
    }
    for name, use in what.items():
        out.print(f"{files[name]!s:<40} {use}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app(prog_name="paceline")
