"""The table of architectures in docs/architecture.md, from small random models of each.

``python -m tests.models.general_path_table`` writes it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from paceline.errors import InvalidArgument
from paceline.loading import load_runner
from paceline.models.base import KVSequence, ModelRunner, Segment
from paceline.models.transformers import TransformersRunner
from paceline.types import Need
from tests.modelzoo import MODEL_TYPES, make_model

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
START, END = "<!-- tests/models/general_path_table.py writes from here -->", "<!-- to here -->"
_HEAD = (
    "`model_type`", "strategy", "sessions together", "a tree together", "path by default", "heads",
    "exits", "quantised",
)  # fmt: skip
_NUM_SESSIONS = 4


def kinds() -> list[str]:
    """One kind of model for each ``model_type``."""
    first: dict[str, str] = {}
    for kind, model_type in MODEL_TYPES.items():
        first.setdefault(model_type, kind)
    return list(first.values())


def table(directory: Path) -> str:
    """The table, from models below ``directory``."""
    rows = [_row(kind, make_model(kind, directory)) for kind in kinds()]
    order = {"yes": 0, "no": 1}
    rows.sort(key=lambda row: (order[row[2]], order[row[3]], row[1], row[0]))
    lines = [_HEAD, ("---",) * len(_HEAD), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(kind: str, folder: Path) -> tuple[str, ...]:
    runner = TransformersRunner(folder, device="cpu")
    chosen = load_runner(folder, device="cpu")
    return (
        f"`{MODEL_TYPES[kind]}`",
        f"`{runner.strategy}`",
        _yes(_num_forwards(runner, _NUM_SESSIONS, [-1]) == 1),
        _yes(_num_forwards(runner, 1, [-1, -1, 0, 1, 2]) == 1),
        "general" if isinstance(chosen, TransformersRunner) else "fast",
        _yes(Need.HIDDEN_STATES in chosen.provides),
        _yes(Need.SHARED_MODEL in chosen.provides),
        _yes(_loads_quantised(folder)),
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _num_forwards(runner: TransformersRunner, num_sessions: int, tree: list[int]) -> int:
    """How often the model runs for drafts of all sessions, after a prompt each."""
    sequences = [_prefilled(runner, 9 + number) for number in range(num_sessions)]
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    hook = runner.model.register_forward_pre_hook(count)
    draft, parents = np.arange(len(tree), dtype=np.int64), np.array(tree, np.int32)
    runner.forward([Segment(each, draft, parents) for each in sequences])
    hook.remove()
    for sequence in sequences:
        runner.free(sequence)
    return calls


def _prefilled(runner: ModelRunner, length: int) -> KVSequence:
    sequence = runner.new_sequence()
    runner.forward([Segment(sequence, np.arange(length, dtype=np.int64), logits="none")])
    runner.commit(sequence, range(length))
    return sequence


def _loads_quantised(folder: Path) -> bool:
    try:
        load_runner(folder, device="cpu", dtype="q8_0")
    except InvalidArgument:
        return False
    return True


def written() -> str:
    """The table as it stands in the document."""
    return DOCUMENT.read_text(encoding="utf-8").split(START)[1].split(END)[0].strip()


def main() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, after = (*text.partition(START)[:2], text.partition(END)[2])
    with tempfile.TemporaryDirectory() as directory:
        new = table(Path(directory))
    DOCUMENT.write_text(f"{before}{START}\n\n{new}\n\n{END}{after}", encoding="utf-8")
    sys.stdout.write(f"wrote {DOCUMENT}\n")


if __name__ == "__main__":
    main()
