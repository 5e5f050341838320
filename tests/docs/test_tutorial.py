"""The tutorials' Python blocks are run in order, and print what the page shows."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from tests.docs.pages import blocks


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/tutorial-drafter.md"])
def test_the_page_shows_what_its_program_prints(page: str) -> None:
    program = [block for block in blocks(page) if block.language in ("python", "text")]
    assert sum(block.language == "text" for block in program) >= 5
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in program:
        if block.language == "text":
            assert printed == block.text, f"{block} shows something else"
            printed = ""
            continue
        assert not printed, f"{block}: what the block before prints is not shown"
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block.text, str(block), "exec"), names)
        printed = output.getvalue()
    assert not printed
