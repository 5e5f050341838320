"""`paceline profile`: measure what drafting and verifying cost on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.cluster.cli_output import err, local_model, out
from paceline.errors import InvalidArgument
from paceline.loading import load_engine, pick_device
from paceline.model_names import default_drafter, resolve_model
from paceline.profile import CostProfile, default_path, measure, new_session, plot, profile_key
from paceline.types import Budget

FILES = ("ca", "cert", "key")


def run(
    target: str | None,
    drafter: str | None,
    *,
    server: str | None,
    client_options: Mapping[str, Any],
    dtype: str,
    device: str,
    numerics: str,
    repetitions: int,
    file: Path | None,
    plot_file: Path | None,
) -> dict[str, Any]:
    """Measure a cost profile, save it and draw it.

    Raises:
        InvalidArgument: an option is wrong, or no drafter answers at ``server``.
    """
    device = pick_device(device)
    target_path = resolve_model(target or "demo")
    drafter_path = local_model(drafter) or default_drafter(target)
    engine = load_engine(target_path, drafter_path, dtype=dtype, device=device, numerics=numerics)
    key = profile_key(target_path, drafter_path, dtype, device, numerics)
    round_trip = 0.0
    if server:
        round_trip = _round_trip(server, engine.target.vocab_size, client_options)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("")
        profile = measure(
            engine,
            key,
            repetitions=repetitions,
            round_trip_seconds=round_trip,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    file = file or default_path(key)
    try:
        profile.save(file)
    except OSError as error:
        raise InvalidArgument("out", str(file), f"a file that can be written ({error})") from error
    if plot_file is not None:
        plot(profile, plot_file)
    return {"file": str(file), "plot": str(plot_file) if plot_file else None, "profile": profile}


def _round_trip(server: str, vocab_size: int, client_options: Mapping[str, Any]) -> float:
    """Median seconds to a DraftService and back, without the time to draft."""
    from paceline.drafters.base import at_once
    from paceline.rpc.remote_drafter import RemoteDrafter
    from paceline.rpc.tls import ClientTls

    # Replicas authenticate by certificates, not by tokens.
    files = {name: str(client_options[name]) for name in FILES if name in client_options}
    tls = ClientTls(**files) if files else None

    session = new_session(vocab_size, 0, 16)
    with RemoteDrafter(server, vocab_size=vocab_size, tls=tls) as remote:
        if not remote.wait_ready(10.0):
            raise InvalidArgument("server", server, "the address of a running DraftService")
        seconds = []
        for _ in range(32):
            started = perf_counter()
            at_once(remote.propose([session], [Budget(1, 1)]))
            seconds.append(perf_counter() - started)
        remote.close(session)
    return median(seconds[1:])


def show(file: str, profile: CostProfile) -> None:
    """Print the costs of verifying and drafting, in milliseconds."""
    for title, columns, seconds in (
        ("target forward, tokens of each session", profile.nodes, profile.verify_seconds),
        ("draft, depth", profile.depths, profile.draft_seconds),
    ):
        table = Table(title=f"{title} (ms)", title_justify="left", box=None)
        table.add_column("batch", justify="right")
        for column in columns:
            table.add_column(str(column), justify="right")
        for batch, row in zip(profile.batches, seconds, strict=False):
            table.add_row(str(batch), *(f"{1e3 * value:.2f}" for value in row))
        out.print(table)
    out.print(f"kept in {file}", markup=False, highlight=False, soft_wrap=True)
