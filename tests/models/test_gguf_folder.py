"""GGUF files as targets: what the file says, computed by the kernels, or a clear error."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from benchmarks.to_gguf import to_gguf
from paceline import gguf_folder
from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.errors import InvalidArgument, ModelNotFound, PacelineError
from paceline.gguf_folder import folder_of, tensors
from paceline.loading import load_engine
from paceline.models.base import Segment
from paceline.models.heads.base import HeadTarget
from paceline.models.llama import LlamaRunner
from paceline.models.llama_tensors import read_weight
from paceline.models.quants import Quantised
from paceline.sampling import SamplingParams
from paceline.tokenizer import IncrementalDecoder, chat_template, eos_token_ids, load_tokenizer
from tests.core.prompts import code_prompts
from tests.core.runners import load_runner
from tests.heads import untrained

TEXTS = (
    "def read(path):\n    with open(path) as file:\n        return file.read()\n",
    "It's 12345 o'clock,\r\n\r\n  \tand   Größe 漢字 \U0001f600!  ",
    "",
    "a<|endoftext|>b",
)
METHODS = ("draft_model", "prompt_lookup", "sequoia", "layer_skip", "lookahead")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda name: tmp_path / name)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def file(kind: str) -> Path:
        if kind not in made:
            made[kind] = folder / f"{kind}.gguf"
            to_gguf(TARGET_DIR, made[kind], kind)
        return made[kind]

    return file


def logits(runner: LlamaRunner, tokens: list[int]) -> torch.Tensor:
    sequence = runner.new_sequence()
    try:
        return runner.forward([Segment(sequence, np.array(tokens), logits="all")]).logits
    finally:
        runner.free(sequence)


def floats(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a file's blocks stand for."""
    out = {}
    for name, tensor in tensors(folder).items():
        found = read_weight(tensor)
        numbers = torch.from_numpy(found.floats()) if isinstance(found, Quantised) else found
        out[name] = numbers.float().clone()
    return out


def test_float32_is_the_folder_it_was_made_of(files: Callable[[str], Path]) -> None:
    runner, folder = load_runner(folder_of(files("F32"))), load_runner(TARGET_DIR)
    tokens = load_tokenizer(TARGET_DIR).encode(TEXTS[0])
    assert torch.equal(logits(runner, tokens), logits(folder, tokens))
    assert runner.fingerprint == folder.fingerprint
    assert runner.num_parameters == folder.num_parameters


@pytest.mark.one_of(3)
@pytest.mark.parametrize("kind", ["BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_logits_are_near_those_of_the_weights_in_the_file(
    kind: str, files: Callable[[str], Path], tmp_path: Path
) -> None:
    """Against transformers on the same weights in float32, which rounds no inputs to eight bits."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    source = folder_of(files(kind))
    runner = load_runner(source)
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "config.json").write_text((source / "config.json").read_text())
    save_file(floats(source), reference / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    tokens = load_tokenizer(TARGET_DIR).encode(TEXTS[0])
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    found = logits(runner, tokens).log_softmax(-1)
    divergence = (expected.exp() * (expected - found)).sum(-1)
    assert divergence.max() < (1e-6 if kind in ("BF16", "F16") else 2e-2)


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize(("kind", "temperature"), [("Q4_1", 0.0), ("Q4_1", 0.8), ("Q8_0", 0.0)])
def test_tokens_are_ars(kind: str, temperature: float, files: Callable[[str], Path]) -> None:
    engine = load_engine(files(kind), DRAFTER_DIR)
    prompts = code_prompts(engine.tokenizer, 3)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    expected = [
        session.output_ids
        for prompt in prompts
        for session in engine.generate([prompt], params, SpeculationConfig(method="ar"))
    ]
    for method in METHODS:
        config = SpeculationConfig(method=method, length="fixed")
        together = engine.generate(prompts, params, config)
        assert [session.output_ids for session in together] == expected, method


def test_a_drafter_in_a_file_drafts(tmp_path: Path) -> None:
    to_gguf(DRAFTER_DIR, tmp_path / "drafter.gguf", "Q8_0")
    engine = load_engine(TARGET_DIR, tmp_path / "drafter.gguf")
    (prompt,) = code_prompts(engine.tokenizer, 1)
    config = SpeculationConfig(method="draft_model", length="fixed")
    (session,) = engine.generate([prompt], SamplingParams(max_tokens=48, ignore_eos=True), config)
    (expected,) = load_engine().generate(
        [prompt], SamplingParams(max_tokens=48, ignore_eos=True), SpeculationConfig(method="ar")
    )
    assert session.output_ids == expected.output_ids
    assert session.stats.mean_accepted_length > 2


def test_heads_draft_for_a_file(files: Callable[[str], Path], tmp_path: Path) -> None:
    """Also those that run the target's last layers, which they read from the file."""
    target = HeadTarget.from_folder(folder_of(files("Q4_1")))
    untrained("eagle", target).save(tmp_path / "heads" / "eagle")
    untrained("moa", target, target_layers=1).save(tmp_path / "heads" / "moa")
    engine = load_engine(files("Q4_1"), heads=tmp_path / "heads")
    prompts = code_prompts(engine.tokenizer, 2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = engine.generate(prompts, params, SpeculationConfig(method="ar"))
    for method in ("eagle2", "moa"):
        config = SpeculationConfig(method=method, length="fixed")
        sessions = engine.generate(prompts, params, config)
        assert [s.output_ids for s in sessions] == [s.output_ids for s in expected], method


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_is_the_folders(text: str, files: Callable[[str], Path]) -> None:
    ours, theirs = load_tokenizer(files("F32")), load_tokenizer(TARGET_DIR)
    assert ours.vocabulary() == theirs.vocabulary()
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert eos_token_ids(files("F32")) == eos_token_ids(TARGET_DIR)
    assert chat_template(files("F32")).source == ""


# --- SentencePiece --------------------------------------------------------------------------------


NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
SPECIAL = ("<unk>", "<s>", "</s>")


def pieces_of(corpus: str) -> list[str]:
    """Single characters, and what often stands together."""
    words = re.findall("\u2581\\w+|\\W", "\u2581" + corpus.replace(" ", "\u2581"))
    parts = Counter(word[i:j] for word in words for i in range(len(word))
                    for j in range(i + 1, len(word) + 1))  # fmt: skip
    return [part for part, _ in parts.most_common(500)]


def with_sentencepiece(document: Any) -> None:
    """Puts such a tokenizer, with scores at random, into a file of the demo target."""
    keys = document["keys"]
    size = len(keys["tokenizer.ggml.tokens"][0])
    (strings, kinds) = (keys[f"tokenizer.ggml.{n}"][1] for n in ("tokens", "token_type"))
    pieces = pieces_of(" ".join(TEXTS[:2]) * 2)
    tokens = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    unused = size - len(tokens)
    assert unused > 0
    tokens += [f"<unused{i}>" for i in range(unused)]
    random = np.random.default_rng(3)
    scores = [*[0.0] * 259, *(-random.permutation(len(pieces)).astype(float)), *[0.0] * unused]
    for name in ("merges", "pre", "add_bos_token"):
        keys.pop(f"tokenizer.ggml.{name}", None)
    floats = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32]
    keys["tokenizer.ggml.model"] = "llama", STRING
    keys["tokenizer.ggml.tokens"] = tokens, strings
    keys["tokenizer.ggml.token_type"] = [*types, *[UNUSED] * unused], kinds
    keys["tokenizer.ggml.scores"] = scores, floats
    keys["tokenizer.ggml.bos_token_id"] = 1, UINT32
    keys["tokenizer.ggml.eos_token_id"] = 2, UINT32


def merged(text: str, document: Any) -> list[int]:
    """What SentencePiece does: the neighbours of the highest score first, from the left."""
    keys = {name: value for name, (value, _) in document["keys"].items()}
    tokens, scores, kinds = (
        keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")
    )
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] == NORMAL}
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        found = [
            (scores[ids[both]], -i)
            for i in range(len(parts) - 1) if (both := parts[i] + parts[i + 1]) in ids
        ]  # fmt: skip
        if not found:
            break
        place = -max(found)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    out = [1]
    for part in parts:
        out += [ids[part]] if part in ids else [byte + 3 for byte in part.encode()]
    return out


def test_sentencepiece(files: Callable[[str], Path], tmp_path: Path) -> None:
    document: Any = {}

    def edit(found: Any) -> None:
        with_sentencepiece(found)
        document.update(found)

    file = edited(files("F32"), tmp_path / "pieces.gguf", edit)
    tokenizer = load_tokenizer(file)
    random = np.random.default_rng(4)
    words = " ".join(TEXTS[:2]).split()
    for _ in range(50):
        text = " ".join(random.choice(words, 6)) + random.choice(["", " \U0001f600", "\n", "  x"])
        ids = tokenizer.encode(text)
        assert ids == merged(text, document), text
        assert tokenizer.decode(ids) == text
        decoder = IncrementalDecoder(tokenizer)
        assert "".join(decoder.push(token) for token in ids) + decoder.flush() == text
    assert tokenizer.encode("a</s>b") == [*merged("a", document), 2, *merged("b", document)[1:]]
    assert eos_token_ids(file) == (2,)
    engine = load_engine(file)
    config = SpeculationConfig(method="prompt_lookup")
    prompt = engine.tokenizer.encode("with open")
    (session,) = engine.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True), config)
    assert len(session.output_ids) == 4


def test_sentencepiece_without_a_space_before(files: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(document: Any) -> None:
        with_sentencepiece(document)
        document["keys"]["tokenizer.ggml.add_space_prefix"] = False, [gguf.GGUFValueType.BOOL]
        document["keys"]["tokenizer.ggml.add_bos_token"] = False, [gguf.GGUFValueType.BOOL]

    tokenizer = load_tokenizer(edited(files("F32"), tmp_path / "pieces.gguf", edit))
    ids = tokenizer.encode("with open")
    assert tokenizer.decode(ids[:1]).startswith("w")
    assert tokenizer.decode(ids) == "with open"


# --- files that are not understood ----------------------------------------------------------------


def edited(file: Path, out: Path, edit: Callable[[Any], None]) -> Path:
    """The file with another header: ``edit`` gets {key: value}."""
    reader = gguf.GGUFReader(file)
    keys = {
        name: (field.contents(), field.types)
        for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }  # fmt: skip
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    document = {"keys": keys, "tensors": tensors}
    edit(document)
    writer = gguf.GGUFWriter(out, "")
    writer.kv_data = [{}]
    for name, (value, types) in keys.items():
        sub_type = types[-1] if types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, types[0], sub_type)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, np.array(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


STRING, UINT32 = [gguf.GGUFValueType.STRING], [gguf.GGUFValueType.UINT32]


def setting(name: str, value: Any, types: list[gguf.GGUFValueType]) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        document["keys"][name] = value, types

    return edit


def without(name: str) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        del document["tensors" if name in document["tensors"] else "keys"][name]

    return edit


def renamed(old: str, new: str) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        document["tensors"][new] = document["tensors"].pop(old)

    return edit


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (setting("general.architecture", "mamba", STRING), "mamba.*llama, qwen2, qwen3"),
        (setting("llama.expert_count", 8, UINT32), "llama.expert_count.*8"),
        (setting("llama.rope.scaling.type", "yarn", STRING), "rope.scaling.type.*yarn"),
        (setting("llama.rope.dimension_count", 16, UINT32), "rope.dimension_count"),
        (setting("tokenizer.ggml.model", "bert", STRING), "tokenizer.ggml.model.*bert"),
        (setting("tokenizer.ggml.pre", "tekken", STRING), "tokenizer.ggml.pre.*tekken"),
        (without("llama.block_count"), "llama.block_count"),
        (without("token_embd.weight"), "token_embd.weight"),
        (without("blk.1.attn_k.weight"), r"layers\.1\.self_attn\.k_proj"),
        (renamed("blk.1.ffn_up.weight", "blk.1.ffn_up_shexp.weight"), "ffn_up_shexp"),
        (renamed("blk.0.attn_q.weight", "blk.9.attn_q.weight"), "attn_q|q_proj"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    edit: Callable[[Any], None], words: str, files: Callable[[str], Path], tmp_path: Path
) -> None:
    file = edited(files("Q4_1"), tmp_path / "edited.gguf", edit)
    with pytest.raises(PacelineError) as caught:
        load_engine(file)
    assert re.search(words, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_type_is_refused(files: Callable[[str], Path], tmp_path: Path) -> None:
    def retype(document: Any) -> None:
        data, _ = document["tensors"]["blk.0.attn_q.weight"]
        count = data.size // 20 * 18  # IQ4_NL has a scale for 32 weights, and Q4_1 a least, too
        document["tensors"]["blk.0.attn_q.weight"] = (
            np.resize(data, count).reshape(data.shape[0], -1), gguf.GGMLQuantizationType.IQ4_NL,
        )  # fmt: skip

    with pytest.raises(InvalidArgument, match=r"blk\.0\.attn_q.*IQ4_NL.*Q4_0, Q4_1"):
        load_engine(edited(files("Q4_1"), tmp_path / "edited.gguf", retype))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.999])
def test_a_truncated_file_is_refused(
    share: float, files: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = files("Q8_0").read_bytes()
    file = tmp_path / "short.gguf"
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelNotFound, match=r"short\.gguf"):
        load_engine(file)


def test_a_file_that_is_replaced_is_read_anew(files: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(files("Q8_0").read_bytes())
    first = folder_of(file)
    assert folder_of(file) == first
    file.write_bytes(files("Q4_1").read_bytes())
    second = folder_of(file)
    assert second != first
    index = json.loads((second / "model.gguf.json").read_text())
    assert index["model.embed_tokens.weight"]["type"] == "Q4_1"


# --- weights that are rounded when they are loaded ------------------------------------------------


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "int8", "auto"])
def test_a_folder_in_another_dtype(dtype: str) -> None:
    engine = load_engine(TARGET_DIR, DRAFTER_DIR, dtype=dtype)
    fingerprint = engine.local_target.runner.fingerprint
    assert fingerprint.dtype == ("bfloat16" if dtype == "auto" else dtype)
    prompts = code_prompts(engine.tokenizer, 2)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    sessions = engine.generate(prompts, params, SpeculationConfig(method="ar"))
    for method in METHODS:
        config = SpeculationConfig(method=method, length="fixed")
        for prompt, expected in zip(prompts, sessions, strict=True):
            (session,) = engine.generate([prompt], params, config)
            assert session.output_ids == expected.output_ids


def test_rounding_at_load_is_the_files_rounding(files: Callable[[str], Path]) -> None:
    """But for the embedding, which a folder has in full."""
    folder = load_runner(TARGET_DIR, blocks="Q8_0")
    file = load_runner(folder_of(files("Q8_0")))
    with torch.no_grad():
        file._weights = replace(file._weights, embedding=folder.embedding)
    tokens = load_tokenizer(TARGET_DIR).encode(TEXTS[0])
    assert torch.equal(logits(folder, tokens), logits(file, tokens))


def test_a_dtype_that_there_is_not() -> None:
    with pytest.raises(InvalidArgument, match=r"dtype: got 'q3_k'.*q8_0.*auto"):
        load_engine(dtype="q3_k")
