"""What loading takes, and models that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import (
    DTYPES,
    FILES,
    FLOATS,
    FOLDERS,
    SIZES,
    Load,
    make_checkpoint,
    measure_load,
    measure_replicas,
)
from paceline.cache import cache_folder
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.loading import load_runner
from paceline.memory import check_fits, memory
from paceline.model_names import PACKAGED_MODELS, resolve_model
from paceline.models.layouts import load_tensors, stored_tensors
from tests.modelzoo import make_model

MOST = 1.2
MB = 1_000_000


def both(name: str, model: Path, dtype: str, path: str, cache: Path) -> list[Load]:
    """A load with an empty cache, and one more."""
    return [measure_load(name, model, dtype, path, cache) for _ in range(2)]


@pytest.mark.slow
def test_a_load_takes_little_more_than_it_keeps(tmp_path: Path, own_cache: Path) -> None:
    model = make_checkpoint("float32", tmp_path, SIZES | {"num_hidden_layers": 4})
    cold, warm = both("float32", model, "bfloat16", "fast", own_cache)
    assert (cold.cache, warm.cache) == ("cold", "warm")
    # Two bytes for each of 110 million weights; the file has four.
    assert 200 * MB < warm.used < 260 * MB
    assert warm.ratio < MOST  # of the first load, which packs: by night, for every dtype
    assert warm.used_anonymous < 40 * MB  # the rest is shared with other replicas


@pytest.mark.nightly
def test_a_first_load_that_converts(tmp_path: Path, own_cache: Path) -> None:
    """On the general path; the fast one packs above, which converts, too."""
    model = make_checkpoint("bfloat16", tmp_path, SIZES | {"num_hidden_layers": 4})
    load = measure_load("bfloat16", model, "float32", "general", own_cache)
    assert load.cache == "cold"
    assert load.ratio < MOST, load


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_general_path_converts_every_number(dtype: str, tmp_path: Path) -> None:
    """Tensors of more than a million numbers are converted in pieces."""
    stored = torch.float32 if dtype == "bfloat16" else torch.bfloat16
    folder = make_model("gpt2", tmp_path, dtype=str(stored).split(".")[1], vocab_size=2**15)
    runner: Any = load_runner(folder, dtype=dtype, kv_tokens=64)
    parameters = dict(runner.model.named_parameters())
    tensors = load_tensors(folder)
    assert any(tensor.numel() > 2**20 for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert tensor.dtype is stored
        found = parameters[name]
        assert type(found) is torch.nn.Parameter
        assert torch.equal(found, tensor.to(getattr(torch, dtype))), name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*FOLDERS, *FILES])
def test_any_checkpoint_in_any_dtype(
    kind: str, dtype: str, checkpoints: Path, own_cache: Path
) -> None:
    if kind in FILES and dtype not in FLOATS:
        pytest.skip("a file keeps its weights")
    for load in both(kind, make_checkpoint(kind, checkpoints), dtype, "fast", own_cache):
        assert load.ratio < MOST, load


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", FOLDERS)
def test_the_general_path(kind: str, dtype: str, checkpoints: Path, own_cache: Path) -> None:
    load = measure_load(kind, make_checkpoint(kind, checkpoints), dtype, "general", own_cache)
    assert load.ratio < MOST, load


@pytest.mark.nightly
def test_smollm2(own_cache: Path) -> None:
    if (
        PACKAGED_MODELS["smollm2"].find() is None
        and not (cache_folder("models") / PACKAGED_MODELS["smollm2"].file).is_file()
    ):
        pytest.skip("no smollm2 here: paceline models get smollm2")
    model = resolve_model("smollm2")
    cold, warm = both("smollm2", model, "auto", "fast", own_cache)
    assert cold.ratio < MOST
    assert warm.ratio < MOST
    assert cold.used < 350 * MB
    assert warm.used < 350 * MB
    assert cold.seconds < 15
    assert warm.seconds < 2
    pss = measure_replicas(model, "auto", 8, own_cache)
    assert pss["with_model"] - pss["without"] < 8 * 200 * MB + model.stat().st_size


# --- models that do not fit -----------------------------------------------------------------------


def machine(root: Path, **files: str) -> Path:
    """A folder with /proc and /sys; ``__`` stands for a slash."""
    everywhere = {"proc__meminfo": "MemTotal: 8000 kB\nMemAvailable: 6000 kB\n"}
    for name, text in (everywhere | files).items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_memory_of_a_machine(tmp_path: Path) -> None:
    assert memory(machine(tmp_path)) == (8000 * 1024, 6000 * 1024)


@pytest.mark.parametrize("inside", ["0::/\n", "0::/pod/container\n"])
def test_memory_of_a_control_group(inside: str, tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup=inside)
    group = root / "sys/fs/cgroup" / inside.strip()[3:].lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("2500000\n")
    (group / "memory.stat").write_text("anon 500000\nfile 2000000\ninactive_file 1500000\n")
    # Pages of files can be dropped.
    assert memory(root) == (3_000_000, 2_000_000)


def test_memory_of_a_control_group_of_old(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/pod"
    root = machine(tmp_path, proc__self__cgroup="4:memory:/pod\n1:cpu:/\n")
    (root / group).mkdir(parents=True)
    (root / group / "memory.limit_in_bytes").write_text("3000000\n")
    (root / group / "memory.usage_in_bytes").write_text("2500000\n")
    (root / group / "memory.stat").write_text("total_inactive_file 500000\ninactive_file 1\n")
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (root / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("1\n")
    assert memory(root) == (3_000_000, 1_000_000)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.memory.memory", lambda: (16_000, 1_000))
    check_fits(1_000, "model")
    with pytest.raises(InvalidArgument, match=r"need 1,001 bytes.*1,000 bytes.*16,000 bytes"):
        check_fits(1_001, "model")
    monkeypatch.setenv("PACELINE_MEMORY_CHECK", "off")
    check_fits(1_001, "model")


@pytest.mark.parametrize(
    ("kind", "dtype", "per_weight"),
    [
        ("llama", "float32", 4), ("llama", "bfloat16", 2), ("llama", "q8_0", 1),
        ("llama", "q4_0", 0.625), ("gpt2", "float32", 4), ("gpt2", "bfloat16", 2),
    ],
)  # fmt: skip
def test_the_bytes_that_a_model_needs(
    kind: str, dtype: str, per_weight: float, zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    for module in ("llama_weights", "transformers_loading"):
        monkeypatch.setattr(
            f"paceline.models.{module}.check_fits", lambda needed, _: asked.append(needed)
        )
    runner: Any = load_runner(make_model(kind, zoo), dtype=dtype, kv_tokens=64)
    count = (
        runner.num_parameters
        if kind == "llama"
        else sum(parameter.numel() for parameter in runner.model.parameters())
    )
    # The embedding is in floats whatever the dtype.
    table = runner.embedding.numel() * 4 if kind == "llama" else 0
    assert asked
    assert 0.9 * per_weight * (count - table // 4) < asked[0] < 1.1 * (per_weight * count + table)


def test_kv_entries_that_cannot_be_allocated(zoo: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"kv_tokens.*bytes"):
        load_runner(make_model("llama", zoo), kv_tokens=1 << 45)


def test_a_file_that_is_cut_after_a_look(tmp_path: Path) -> None:
    """Between reading the header and reading a tensor."""
    model = make_model("llama", tmp_path)
    tensors = stored_tensors(model)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelNotFound, match="damaged"):
        next(iter(tensors.values())).read()


def test_rows_of_a_stored_tensor(zoo: Path) -> None:
    folder = make_model("llama_sharded", zoo)
    whole = load_tensors(folder)
    for name, tensor in stored_tensors(folder).items():
        assert tensor.shape == whole[name].shape
        assert tensor.dtype is whole[name].dtype
        assert torch.equal(tensor.read(slice(1, 3)), whole[name][1:3])
