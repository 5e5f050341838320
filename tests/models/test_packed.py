"""Packed weights on the disk: mapped by every process, made anew when they are damaged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import gguf_folder
from paceline.gguf_folder import folder_of
from paceline.loading import load_runner
from paceline.models import packed
from paceline.models.base import ModelRunner, Segment
from paceline.models.packing import Packer, Packing
from paceline.models.quants import Quantised, concatenate, read_blocks
from paceline.numerics import InParts, digest_tensors
from tests.models.test_quants import blocks
from tests.modelzoo import make_model


@pytest.fixture(autouse=True)
def _packs_small_models(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST_WEIGHTS", 0)


@pytest.fixture
def folder(own_cache: Path) -> Path:
    return own_cache / "paceline" / "packed"


def logits(runner: ModelRunner) -> torch.Tensor:
    sequence = runner.new_sequence()
    return runner.forward([Segment(sequence, np.arange(4, 20), logits="all")]).logits


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(share: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[int(share * (len(data) - 1))] ^= 1
        file.write_bytes(data)

    damage.__name__ = f"flip at {share}"
    return damage


DAMAGES = [cut, empty, Path.unlink, flip(0.0), flip(0.3), flip(0.7), flip(1.0)]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("ending", ["bin", "json"])
def test_damaged_files_are_made_anew(
    ending: str, damage: Callable[[Path], None], folder: Path, zoo: Path
) -> None:
    model = make_model("llama", zoo)
    expected = logits(load_runner(model, kv_tokens=64))
    (file,) = folder.glob(f"*.{ending}")
    whole = file.read_bytes()
    damage(file)
    runner = load_runner(model, kv_tokens=64)
    assert torch.equal(logits(runner), expected)
    assert file.read_bytes() == whole
    assert sorted(path.suffix for path in folder.iterdir()) == [".bin", ".json", ".lock"]


def test_a_damaged_file_is_reported(
    folder: Path, zoo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama", zoo)
    with caplog.at_level(logging.WARNING):
        load_runner(model, kv_tokens=64)
        load_runner(model, kv_tokens=64)
        assert not caplog.messages
        (file,) = folder.glob("*.bin")
        cut(file)
        load_runner(model, kv_tokens=64)
    assert [str(file) in message for message in caplog.messages] == [True]


def test_loads_at_once_map_one_file(folder: Path, zoo: Path) -> None:
    model, runners = make_model("llama", zoo), []

    def load() -> None:
        runners.append(load_runner(model, kv_tokens=64))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runners) == 4
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[4] for line in maps if str(folder) in line}
    (file,) = folder.glob("*.bin")
    assert mapped == {str(file.stat().st_ino)}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("document", ["config.json", "tokenizer.json", "model.gguf.json"])
def test_damaged_folders_of_gguf_files_are_made_anew(
    document: str, damage: Callable[[Path], None], gguf_file: Path
) -> None:
    folder = folder_of(gguf_file)
    whole = (folder / document).read_bytes()
    damage(folder / document)
    assert folder_of(gguf_file) == folder
    assert (folder / document).read_bytes() == whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.to_gguf import to_gguf
    from paceline.demo import DRAFTER_DIR

    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    to_gguf(DRAFTER_DIR, file, "Q8_0")
    return file


def test_the_folder_has_what_it_names(gguf_file: Path) -> None:
    assert (folder_of(gguf_file) / gguf_folder.WEIGHTS).resolve() == gguf_file


# --- some rows at a time --------------------------------------------------------------------------


@pytest.fixture(params=[16, 32, 1 << 20])
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Packer:
    monkeypatch.setattr(Packer, "_rows_at_a_time", lambda self, inputs: request.param)
    return Packer(torch.float32)


def test_floats_in_one_layout(packer: Packer) -> None:
    weight = torch.randn(90, 64, generator=torch.Generator().manual_seed(0))
    narrow = weight.bfloat16().float()
    for rows in (slice(0, 40), slice(40, 90), slice(88, 90), slice(0, 90)):
        mixed = narrow.clone()
        mixed[rows] = weight[rows]
        packed = packer.pack(mixed)
        assert packed.packing is Packing.FLOATS
        assert torch.equal(packer.unpack(packed), mixed)
    packed = packer.pack(narrow)
    assert packed.packing is not Packing.FLOATS
    assert torch.equal(packer.unpack(packed), narrow)
    assert torch.equal(torch.cat(list(packer.unpack_rows(packed))), narrow)


@pytest.mark.parametrize(
    ("names", "packing"),
    [
        (("Q4_0", "Q4_1"), Packing.NIBBLES),
        (("Q4_1", "Q4_K"), Packing.WIDE_NIBBLES),
        (("Q4_K", "Q4_0"), Packing.WIDE_NIBBLES),
        (("Q8_0", "Q5_0"), Packing.OCTETS),
        (("Q4_K", "Q6_K", "Q8_0"), Packing.WIDE_OCTETS),
        (("Q8_0", "Q4_0"), Packing.WIDE_OCTETS),
    ],
)
def test_blocks_in_one_layout(names: tuple[str, ...], packing: Packing, packer: Packer) -> None:
    parts = [read_blocks(blocks(name), name) for name in names]
    expected = np.concatenate([part.floats() for part in parts])
    outputs = [len(part.q) for part in parts]

    def read(rows: slice) -> Quantised:
        found, first = [], 0
        for part, count in zip(parts, outputs, strict=True):
            start, stop = max(0, rows.start - first), min(count, rows.stop - first)
            if start < stop:
                found.append(part.rows(slice(start, stop)))
            first += count
        return concatenate(found)

    weight = packer.pack_rows(read, sum(outputs), parts[0].shape[1])
    assert weight.packing is packing
    assert np.array_equal(packer.unpack(weight).numpy(), expected)
    assert torch.equal(weight.data, packer.pack_quantised(concatenate(parts)).data)


def test_a_digest_does_not_depend_on_the_parts() -> None:
    whole = torch.arange(9_000_000, dtype=torch.float32).view(-1, 1000)
    for step in (1, 700, 5000, 10_000):
        parts = InParts(tuple(whole.shape), whole.dtype, whole.split(step))
        named = [("a", whole), ("b", whole[:3])]
        made = [("a", parts), ("b", whole[:3])]
        assert digest_tensors(named, {}) == digest_tensors(made, {})
