"""docs/architecture.md says how each architecture runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import general_path_table
from tests.modelzoo import MODEL_TYPES


@pytest.mark.nightly
def test_the_table_is_up_to_date(tmp_path: Path) -> None:
    table = general_path_table.table(tmp_path)
    assert general_path_table.written() == table, "python -m tests.models.general_path_table"


def test_the_table_has_all_architectures() -> None:
    first_cells = [row.split(" | ")[0] for row in general_path_table.written().splitlines()[2:]]
    assert sorted(first_cells) == sorted(f"| `{each}`" for each in set(MODEL_TYPES.values()))
