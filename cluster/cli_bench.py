"""`paceline bench`: options to :func:`paceline.bench.run_bench`, with a progress bar.

:class:`ServerBackend` measures a deployment, beside the engine in this process or instead of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.bench import BatchRun, BenchOptions, SequenceRun, run_bench
from paceline.cluster.cli_generate import check_address
from paceline.cluster.cli_output import err
from paceline.errors import InvalidArgument
from paceline.methods import METHODS

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.rpc.client import Client
    from paceline.sampling import SamplingParams
    from paceline.tokenizer import Tokenizer


class ServerBackend:
    """A deployment that answers at ``client`` (see :class:`paceline.bench.Backend`).

    Args:
        tokenizer: of the served model.
        batch: how many calls run at a time.

    Raises:
        InvalidArgument: the server's model has another vocabulary.
    """

    topology = "actors"

    def __init__(self, client: Client, tokenizer: Tokenizer, batch: int) -> None:
        model = client.get_model()
        if model.vocab_size != tokenizer.vocab_size:
            raise InvalidArgument(
                "server",
                f"a model with {model.vocab_size} tokens",
                f"the target that is measured here, with {tokenizer.vocab_size} tokens",
            )
        self._client = client
        self._pool = ThreadPoolExecutor(batch)
        self.batch_invariant: bool = model.batch_invariant
        self.fingerprint: str = model.fingerprint
        self.methods = [name for name in model.methods if name != "client"]
        self.unavailable = {
            name: "the server does not offer it" for name in METHODS if name not in model.methods
        }
        self.tokenizer = tokenizer
        self.context_length: int = model.context_length

    def generate(
        self,
        speculation: SpeculationConfig,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> BatchRun:
        """Send all prompts at once and wait for the last answer."""
        started = time.perf_counter()
        sequences = list(
            self._pool.map(lambda prompt: self._generate(speculation, prompt, params), prompts)
        )
        return BatchRun(
            sequences=tuple(sequence for sequence, _ in sequences),
            seconds=time.perf_counter() - started,
            round_seconds=tuple(seconds for _, rounds in sequences for seconds in rounds),
        )

    def _generate(
        self, speculation: SpeculationConfig, prompt: Sequence[int], params: SamplingParams
    ) -> tuple[SequenceRun, list[float]]:
        """One generation, and the seconds between the arrivals of its rounds."""
        arrivals, rounds = [], []
        started = time.perf_counter()
        for item in self._client.generate(prompt, params, speculation):
            if item.token_ids:
                arrivals.append(time.perf_counter())
            rounds.append(item)
        first, last = arrivals[0], arrivals[-1]
        statistics = rounds[-1].statistics
        assert statistics is not None  # the last reply carries them
        token_ids = tuple(token for item in rounds for token in item.token_ids)
        later = len(token_ids) - len(rounds[0].token_ids)
        sequence = SequenceRun(
            token_ids=token_ids,
            num_target_forwards=statistics.num_target_forwards,
            num_drafted=statistics.num_drafted,
            num_accepted=statistics.num_accepted,
            decode_tokens_per_second=later / (last - first) if later else None,
            seconds=last - started,
        )
        return sequence, [after - before for before, after in pairwise(arrivals)]

    def forget(self) -> bool:
        """False: a deployment serves others, too, and its drafters keep what they have learnt."""
        return False

    def close(self) -> None:
        """End the threads; the client stays open."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def run(
    options: BenchOptions, server: str | None, client_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a benchmark with a progress bar on stderr; after Ctrl-C, the result so far.

    Args:
        server: address of the deployment that the topologies other than ``colocated`` measure;
            None starts one for the benchmark.
        client_options: how to connect, see
            :func:`paceline.cluster.cli_options.client_options`.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar,
        contextlib.ExitStack() as stack,
    ):
        task = bar.add_task("loading", total=None)

        def report(what: str) -> None:
            bar.update(task, description=what)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        backends = []
        if options.topology != "colocated":
            address = server or stack.enter_context(_deployment(options, report))
            backends.append(stack.enter_context(_backend(options, address, client_options)))
        return run_bench(options, progress, backends, partial=True)


@contextlib.contextmanager
def _deployment(options: BenchOptions, report: Callable[[str], None]) -> Iterator[str]:
    """Deploy the same models as actors on a local Ray; yields the gateway's address."""
    import torch

    from paceline.cluster import local, serving
    from paceline.deployments.config import read_config_file

    modes = {"auto": None, "on": True, "off": False, "both": None}
    model: dict[str, Any] = {
        "target": None if options.target is None else str(options.target),
        "drafter": None if options.drafter is None else str(options.drafter),
        "dtype": options.dtype,
        "device": options.device,
        "batch_invariant": modes[options.batch_invariant],
        "threads": torch.get_num_threads(),
    }
    file = read_config_file(local.DEMO_CONFIG)
    gateway, numerics = {"grpc_port": 0, "http_port": None}, {"numerics": options.numerics}
    file = file.with_args({"model": model, "gateway": gateway, "target": numerics})
    with serving.deployed(file, report=report) as running:
        yield str(running["gateway"])


@contextlib.contextmanager
def _backend(
    options: BenchOptions, address: str, client_options: Mapping[str, Any]
) -> Iterator[ServerBackend]:
    from paceline.demo import TARGET_DIR
    from paceline.rpc.client import Client
    from paceline.tokenizer import load_tokenizer

    with Client(check_address(address), timeout=600, **client_options) as client:
        tokenizer = load_tokenizer(options.target or TARGET_DIR)
        backend = ServerBackend(client, tokenizer, options.batch)
        try:
            yield backend
        finally:
            backend.close()
