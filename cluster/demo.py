"""`paceline demo`: a target and its drafters generate text together.

It runs what a deployment runs, on one machine: Ray Serve, actors and a gateway, with gRPC between
them. It decodes the same prompts as AR on the same target, to compare speed and tokens. SmolLM2
answers questions, its drafters beside it; the embedded pair continues text as two actors.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.chat import encode_chat
from paceline.cluster.cli_generate import ACCEPTED_STYLE, OWN_STYLE, Piece, PieceSplitter
from paceline.cluster.cli_output import err, model_to_show, out
from paceline.cluster.local import CONFIGS, showing_progress
from paceline.cluster.serving import ClusterPortInUse, check_ports, deployed
from paceline.config import SpeculationConfig
from paceline.deployments.config import ConfigFile, read_config_file
from paceline.errors import InvalidArgument
from paceline.model_names import get_model, resolve_model
from paceline.plan import resolve
from paceline.rpc.client import Client, Completion, Round
from paceline.sampling import SamplingParams
from paceline.tokenizer import ChatTemplate, Tokenizer, chat_template, load_tokenizer

_BEES = (
    "The honey bee lives in large colonies of up to 60,000 individuals. Each colony has a single "
    "queen, several hundred drones and thousands of worker bees. The workers collect nectar and "
    "pollen from flowers, and they turn the nectar into honey, which feeds the colony in winter. "
    "A worker bee visits up to 1,500 flowers to fill its honey stomach once."
)
_BEES_TO_CORRECT = (
    "The workers collects nectar and pollen from flowers, and they turns the nectar into honey. A "
    "worker bee visit up to 1,500 flowers to fill its honey stomach once. The queen lay up to "
    "2,000 eggs a day, and she live for several years."
)
AR = SpeculationConfig(method="ar")
REPEATS = 3
"""Timed runs of each prompt with each method, interleaved; the table shows medians."""
CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Demo:
    """The demo of one model.

    Attributes:
        prompts: their names in the table, and their texts.
        chat: the prompts are questions and go through the model's chat template.
        remembers: the drafter drafts from earlier answers, so it is timed once on each prompt.
    """

    prompts: Mapping[str, str]
    chat: bool
    remembers: bool


DEMOS = {
    "smollm2": Demo(
        {
            "question": "What is the capital of France, and what is it known for?",
            "code": "Write a Python function that reverses a string.",
            "summary": f"Summarize the following text:\n\n{_BEES}",
            "edit": f"Correct the grammar of this text:\n\n{_BEES_TO_CORRECT}",
        },
        chat=True,
        remembers=True,
    ),
    "demo": Demo(
        {
            "code": (
                "def read_config(path):\n"
                '    """Read a configuration file and return a dictionary.\n'
            ),
            "class": "class Queue:\n    def __init__(self, maxsize=0):\n",
            "maths": (
                "Question: Anna buys 4 boxes of pencils. Each box holds 12 pencils and costs $3. "
                "She gives half of the pencils to her class. How many pencils does she have left?\n"
                "Answer:"
            ),
        },
        chat=False,
        remembers=False,
    ),
}


class _Run(NamedTuple):
    """What came, and the seconds that all its tokens take at the speed of those after the first
    round. That one waits until the prompt is read, and only the first run has to read it.
    """

    completion: Completion
    seconds: float


@dataclass
class _Prompt:
    """The measurements of one prompt."""

    drafts: list[_Run] = field(default_factory=list)
    ar: list[_Run] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether all runs, with drafts and without, gave the same tokens."""
        return len({run.completion.token_ids for run in (*self.drafts, *self.ar)}) == 1

    @property
    def num_tokens(self) -> int:
        return len(self.ar[0].completion.token_ids)


def run(
    max_tokens: int = 96,
    *,
    model: str | None = None,
    length: str | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Start a deployment, generate, compare with AR, and stop the deployment.

    Args:
        max_tokens: most tokens for each prompt.
        model: a key of :data:`DEMOS`; None: SmolLM2, or the demo pair if it cannot be downloaded.
        length: length controller; None: the method's own.
        show: print text and table, too.

    Returns:
        ``identical_to_ar``, tokens per second with and without drafts, speedup, mean accepted
        length, acceptance rate, the process ids of target and drafter, and the same by prompt;
        ``ready_s`` and ``first_token_s``: seconds from the start of this process until all was
        ready, and until the first token came.

    Raises:
        InvalidArgument: ``max_tokens`` below 1, or no such model or length controller.
        ModelNotFound: the model cannot be downloaded.
        ClusterError: Ray, Serve or a replica does not start; the message says why.
    """
    params = SamplingParams(max_tokens=max_tokens)
    model = _model(model)
    demo = DEMOS[model]
    file = _with_free_port(read_config_file(CONFIGS[model]))
    drafts = SpeculationConfig(method=file.config.speculation.method, length=length)
    resolve(drafts)
    prompts = _Prompts(demo, file.config.target_folder)
    with showing_progress(show) as report, deployed(file, report=report) as described:
        ready_s = process_age_s()
        address = described["gateway"]
        with Client(address, timeout=CALL_TIMEOUT_S) as client:
            report("first tokens")
            first_token_s = _warm_up(client, prompts, drafts)
            report("")
            if show:
                err.print(
                    f"[dim]Ray, target, drafter and gateway were ready after {ready_s:.1f} s, the "
                    f"first token came after {first_token_s:.1f} s; the gateway is at {address} "
                    f"(gRPC) and {described['http']}/v1 (HTTP)[/]",
                    highlight=False,
                )
                _print_legend(out)
            measured = {
                name: _measure(client, prompts, text, params, drafts, show)
                for name, text in demo.prompts.items()
            }
        result = {
            "model": model, **_result(measured, described),
            "ready_s": ready_s, "first_token_s": first_token_s,
        }  # fmt: skip
        if show:
            out.print()
            out.print(_table(measured, result))
        with showing_progress(show) as closing:
            closing("shutting down")
    if show and not result["identical_to_ar"]:
        err.print("the tokens with drafts differ from AR: that must not happen", style="bold red")
    return result


def _model(name: str | None) -> str:
    """A key of :data:`DEMOS`; its model is downloaded if needed."""
    if name is None:
        return model_to_show()
    if name not in DEMOS:
        raise InvalidArgument("model", name, " or ".join(DEMOS))
    get_model(name)
    return name


class _Prompts:
    """Makes of a prompt what is sent: its text, or the tokens of a conversation."""

    def __init__(self, demo: Demo, target: str) -> None:
        self.demo = demo
        path = resolve_model(target)
        self.tokenizer: Tokenizer = load_tokenizer(path)
        self._template: ChatTemplate | None = chat_template(path) if demo.chat else None

    def __call__(self, text: str) -> str | list[int]:
        if self._template is None:
            return text
        return encode_chat(self.tokenizer, self._template, [{"role": "user", "content": text}])


def _with_free_port(file: ConfigFile) -> ConfigFile:
    """The file with free ports: the demo runs beside other deployments."""
    try:
        check_ports(file)
    except ClusterPortInUse:
        return file.with_args({"gateway": {"grpc_port": 0, "http_port": 0}})
    return file


def process_age_s() -> float:
    """Seconds since this process started, with Python's start and all imports."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _warm_up(client: Client, prompts: _Prompts, drafts: SpeculationConfig) -> float:
    """Run AR and drafts once, so that everything is loaded before runs are timed.

    Returns:
        Age of this process in seconds when the first token came.
    """
    params = SamplingParams(max_tokens=8)
    ages = [
        process_age_s()
        for method in (AR, drafts)
        for _ in client.generate(prompts("import os\n"), params, method)
    ]
    return ages[0]


def _measure(
    client: Client,
    prompts: _Prompts,
    text: str,
    params: SamplingParams,
    drafts: SpeculationConfig,
    show: bool,
) -> _Prompt:
    """Drafts first: a head drafts from what the target reads, and AR leaves it nothing to read."""
    measured, prompt = _Prompt(), prompts(text)
    rounds = client.generate(prompt, params, drafts)
    measured.drafts.append(_timed(_shown(rounds, prompts, text) if show else rounds))
    with showing_progress(show and err.is_terminal) as report:  # a log needs no such line
        report("timing AR" if prompts.demo.remembers else "timing drafts against AR")
        for n in range(REPEATS):
            if n and not prompts.demo.remembers:
                measured.drafts.append(_timed(client.generate(prompt, params, drafts)))
            measured.ar.append(_timed(client.generate(prompt, params, AR)))
    return measured


def _timed(rounds: Iterable[Round]) -> _Run:
    begin = time.perf_counter()
    came = [(each, time.perf_counter()) for each in rounds]
    completion = Completion.of([each for each, _ in came])
    (first, start), (_, end) = came[0], came[-1]
    num_tokens = len(completion.token_ids)
    num_later = num_tokens - len(first.token_ids)
    seconds = (end - start) * num_tokens / num_later if num_later else end - begin
    return _Run(completion, seconds)


# --- on the terminal ------------------------------------------------------------------------------


def _print_legend(console: Console) -> None:
    if _plain(console):
        console.print("legend: «accepted from the draft», the target's own")
    else:
        console.print(
            Text.assemble(
                ("legend: ", "dim"), ("accepted from the draft", ACCEPTED_STYLE), " ",
                ("the target's own", OWN_STYLE),
            )
        )  # fmt: skip


def _plain(console: Console) -> bool:
    """Whether the console shows no colours, so that «» mark accepted text."""
    return console.no_color or not console.is_terminal


def _shown(rounds: Iterable[Round], prompts: _Prompts, text: str) -> Iterator[Round]:
    """Print the prompt, and the text after it as its tokens are committed."""
    splitter = PieceSplitter(prompts.tokenizer)
    out.print()
    if prompts(text) == text:
        out.print(Text(text, "dim"), end="", soft_wrap=True)
    else:  # a question with its answer below
        out.print(Text(f"> {text}", "dim"), soft_wrap=True)
    marks = _Marks(out)
    for each in rounds:
        yield each
        for piece in splitter.split(each.token_ids, each.num_accepted, each.text):
            marks.print(piece)
        out.file.flush()
    marks.close()


class _Marks:
    """Prints pieces in colour, or accepted runs between « and »."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plain = _plain(console)
        self._inside = False

    def print(self, piece: Piece) -> None:
        text, accepted = piece.text, bool(piece.accepted)
        if self._plain:
            text = self._switch(accepted) + text
        style = ACCEPTED_STYLE if accepted else OWN_STYLE
        self._console.print(Text(text, style), end="", soft_wrap=True)

    def close(self) -> None:
        self._console.print(self._switch(False) if self._plain else "", soft_wrap=True)

    def _switch(self, accepted: bool) -> str:
        mark = {(False, True): "«", (True, False): "»"}.get((self._inside, accepted), "")
        self._inside = accepted
        return mark


# --- the comparison -------------------------------------------------------------------------------


def _result(measured: dict[str, _Prompt], described: dict[str, Any]) -> dict[str, Any]:
    rows = {name: _row([prompt]) for name, prompt in measured.items()}
    last = next(iter(measured.values())).drafts[0].completion.last
    return {
        **_row(list(measured.values())),
        "target_pid": last.target_pid,
        "drafter_pid": last.drafter_pid,
        "gateway": described["gateway"],
        "prompts": rows,
    }


def _row(prompts: list[_Prompt]) -> dict[str, Any]:
    """Sums over prompts; ratios of sums."""
    num_tokens = sum(p.num_tokens for p in prompts)
    with_drafts = num_tokens / sum(_median_seconds(p.drafts) for p in prompts)
    ar = num_tokens / sum(_median_seconds(p.ar) for p in prompts)
    stats = [p.drafts[0].completion.statistics for p in prompts]
    drafted = sum(s.num_drafted for s in stats)
    return {
        "num_tokens": num_tokens,
        "tokens_per_second": with_drafts,
        "ar_tokens_per_second": ar,
        "speedup": with_drafts / ar,
        "mean_accepted_length": sum(s.num_tokens for s in stats)
        / sum(s.num_target_forwards for s in stats),
        "acceptance_rate": sum(s.num_accepted for s in stats) / drafted if drafted else 0.0,
        "drafter_lost": any(s.drafter_lost for s in stats),
        "identical_to_ar": all(p.identical for p in prompts),
    }


def _median_seconds(runs: Sequence[_Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def _table(measured: dict[str, _Prompt], result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['model']}: drafts against AR on the same target")
    table.add_column("")
    columns = [*(result["prompts"][name] for name in measured), result]
    for name in (*measured, "all"):
        table.add_column(name, justify="right", style="bold" if name == "all" else "")
    for label, key, form in (
        ("tokens", "num_tokens", "{}"),
        ("tokens/s with drafts", "tokens_per_second", "{:.0f}"),
        ("tokens/s AR", "ar_tokens_per_second", "{:.0f}"),
        ("speedup", "speedup", "{:.2f}×"),
        ("mean accepted length", "mean_accepted_length", "{:.2f}"),
        ("acceptance rate", "acceptance_rate", "{:.2f}"),
    ):
        table.add_row(label, *(form.format(column[key]) for column in columns))
    table.add_row(
        "tokens identical to AR",
        *(
            Text("yes", "green") if column["identical_to_ar"] else Text("NO", "bold red")
            for column in columns
        ),
    )
    table.add_section()
    blank = [""] * len(measured)
    table.add_row("target actor, process", *blank, str(result["target_pid"]))
    if result["drafter_pid"] != result["target_pid"]:
        table.add_row("drafter actor, process", *blank, str(result["drafter_pid"]))
    return table
