"""From models to a runner, a tokenizer and an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from paceline.demo import DIFFUSION_DIR, OWN_TOKENS_DIR, TARGET_DIR
from paceline.diffusion.model import MaskedModel
from paceline.diffusion.runner import BlockRunner
from paceline.drafters.base import Drafter, DrafterContext
from paceline.drafters.diffuspec import DiffuSpec
from paceline.drafters.draft_model import DraftModel, DraftModels
from paceline.drafters.head import HeadDrafter
from paceline.drafters.non_autoregressive import NonAutoregressive
from paceline.drafters.omnidraft import OmniDraft, Translator
from paceline.engine import Engine, EngineLimits
from paceline.errors import InvalidArgument
from paceline.gguf_folder import is_foreign, model_folder
from paceline.lengths.base import LengthContext
from paceline.masked_folder import masked_kind
from paceline.memory import give_back
from paceline.methods import DRAFTERS
from paceline.model_names import default_drafter, resolve_heads, resolve_model
from paceline.models import kernels
from paceline.models.architectures import MODEL_TYPES, text_config
from paceline.models.base import ModelRunner
from paceline.models.gguf import GgufRunner
from paceline.models.heads import HeadLibrary, heads_folder
from paceline.models.heads.layer import distant_target
from paceline.models.layouts import read_config
from paceline.models.llama import LlamaRunner
from paceline.numerics import refuse_portable
from paceline.profile import LoadCosts, profile_key, weights_digest
from paceline.request import check_adapter
from paceline.target import ModelTarget
from paceline.tokenizer import Tokenizer, check_same_tokenizer, eos_token_ids, load_tokenizer

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # Loading rounds the weights; activations are float32:
    "q8_0": torch.float32,  # to 8 bits in blocks of 32
    "q4_0": torch.float32,  # to 4 bits in blocks of 32
    "int8": torch.float32,  # to 8 bits, a scale for each output
}
FLOATS = ("float32", "bfloat16", "float16")


def limit_threads(count: int) -> None:
    """Compute with at most ``count`` CPU threads, in torch and in the kernels."""
    torch.set_num_threads(count)
    kernels.set_num_threads(count)


def pick_device(device: str) -> str:
    """``auto`` is CUDA where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not device.startswith("cuda"):
        raise InvalidArgument("device", device, "auto, cpu, cuda or cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidArgument("device", device, "cpu or auto: torch sees no CUDA device here")
    return device


def load_runner(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    batch_invariant: bool | None = None,
    kv_tokens: int | None = None,
    general: bool | None = None,
    int8: bool = False,
    numerics: str = "fastest",
    adapters: Mapping[str, str | Path] | None = None,
) -> ModelRunner:
    """A model from a Hugging Face folder, or a GGUF file.

    Args:
        path: the folder, or a name of the model (:mod:`paceline.model_names`).
        dtype: one of ``DTYPES``; "auto" is the checkpoint's. Weights of a GGUF file stay as they
            are, and their activations are float32.
        batch_invariant: bit-identical logits in any batch; ``None`` means where it is the default.
        kv_tokens: capacity of the KV cache over all sessions.
        general: force (True) or forbid (False) the general path through transformers; ``None``
            takes the fast path for the model types that it knows. Encoder-decoder models are on
            the general path too (:mod:`paceline.models.seq2seq` says what their prompts are).
        int8: a model that drafts may compute its products in eight bits, where that is faster.
        numerics: "fastest" takes what is fastest on this processor; "portable" has the same bits on
            all processors (:mod:`paceline.numerics`).
        adapters: folders of adapters in PEFT's format by name (:mod:`paceline.models.adapters`).

    Raises:
        ModelNotFound: there is no such model, or something in its folder is missing or damaged.
        InvalidArgument: an option that does not fit, or portable numerics where there are none.
    """
    if dtype not in DTYPES and dtype != "auto":
        raise InvalidArgument("dtype", dtype, f"one of {', '.join(DTYPES)}, auto")
    if kv_tokens is not None and kv_tokens < 1:
        raise InvalidArgument("kv_tokens", kv_tokens, "a positive number of tokens")
    folder, device = model_folder(resolve_model(path)), pick_device(device)
    config = read_config(folder)
    if dtype == "auto":
        dtype = _own_dtype(config)
    if general is None:
        general = text_config(config).get("model_type") not in MODEL_TYPES
    if general:
        refuse_portable(
            numerics, f"a model of type {config.get('model_type')!r} runs in transformers"
        )
        if adapters:
            raise InvalidArgument(
                "adapters", list(adapters),
                f"none: a model of type {config.get('model_type')!r} runs in transformers, and "
                "adapters are for those of the fast path",
            )  # fmt: skip
        if dtype not in FLOATS:
            raise InvalidArgument("dtype", dtype, f"{' or '.join(FLOATS)} for other model types")
        from paceline.models.seq2seq import Seq2SeqRunner
        from paceline.models.transformers import TransformersRunner

        runner = Seq2SeqRunner if config.get("is_encoder_decoder") else TransformersRunner
        return runner(
            folder, dtype=DTYPES[dtype], device=device, kv_tokens=kv_tokens,
            batch_invariant=batch_invariant,
        )  # fmt: skip
    return LlamaRunner(
        folder, dtype=DTYPES[dtype], device=device, kv_tokens=kv_tokens,
        batch_invariant=batch_invariant, int8=int8 or dtype == "int8", numerics=numerics,
        blocks=dtype.upper() if dtype in ("q8_0", "q4_0") else None,
        adapters={name: Path(folder).expanduser() for name, folder in (adapters or {}).items()},
    )  # fmt: skip


def _own_dtype(config: dict[str, Any]) -> str:
    """The dtype that a checkpoint says it has; float32 where it does not say."""
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return own if own in FLOATS else "float32"


def load_drafter(
    path: str | Path,
    target: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    kv_tokens: int | None = None,
) -> DraftModel:
    """A draft model for ``target``; ``path`` may be a GGUF file.

    Drafts never change the output, so the drafter need not be batch-invariant, and a float32
    target gets a bfloat16 drafter where that is faster.

    Args:
        path, target: folders or names of models (:mod:`paceline.model_names`); of the target only
            the configuration and the tokenizer are read.
        dtype, device: of the target.

    Raises:
        ModelNotFound, InvalidArgument: as :func:`load_runner`.
        TokenizerMismatch: drafter and target do not share a tokenizer.
    """
    path, target = resolve_model(path), resolve_model(target, weights=False)
    if kind := masked_kind(path):
        raise InvalidArgument("drafter", str(path), f"no masked model: {kind} drafts with those")
    check_same_tokenizer(load_tokenizer(target), load_tokenizer(path))
    runner = _load_draft_runner(path, dtype, device, kv_tokens)
    return DraftModel(runner, _config(target).get("vocab_size"))


def load_masked_drafter(path: str | Path, target: str | Path) -> DiffuSpec | NonAutoregressive:
    """A model that fills masks and drafts for ``target``; :func:`masked_kind` names its drafter.

    Args and raises: as :func:`load_drafter`.
    """
    path, target = resolve_model(path), resolve_model(target, weights=False)
    check_same_tokenizer(load_tokenizer(target), load_tokenizer(path))
    vocab_size = _config(target).get("vocab_size")
    if masked_kind(path) == "non_autoregressive":
        from paceline.models.non_autoregressive import FillingModel

        model = FillingModel(path)
        return NonAutoregressive(model, int(vocab_size or model.vocab_size))
    runner = BlockRunner(MaskedModel.load(path))
    return DiffuSpec(runner, int(vocab_size or runner.vocab_size))


def make_drafter(name: str, target: str | Path) -> tuple[Drafter, int]:
    """A drafter of the catalogue that needs nothing but tokens, and the target's vocabulary size.

    Args:
        name: a key of :data:`paceline.methods.DRAFTERS`.
        target: folder or name; its configuration alone is read.

    Raises:
        ModelNotFound: there is no such target.
        InvalidArgument: the drafter needs more than tokens.
    """

    def refuse(*_: object) -> Any:
        raise InvalidArgument("drafter", name, "a drafter that needs nothing but tokens")

    vocab_size = int(_config(resolve_model(target, weights=False))["vocab_size"])
    return DRAFTERS[name](DrafterContext(vocab_size, refuse, refuse, refuse)), vocab_size


def load_head_drafter(
    kind: str,
    target: str | Path,
    heads: str | Path | None = None,
    *,
    dtype: str = "float32",
    device: str = "auto",
    kv_tokens: int | None = None,
) -> HeadDrafter:
    """A trained head that drafts where its target is not, from states that the target sends.

    It reads the head's folder and, of the target, configuration, embedding and output layer; and
    the layers that a head says it runs itself.

    Args:
        kind: of the head, as in the catalogue.
        target: folder or name; its files must be there.
        heads: as :func:`load_engine`.
        dtype, device: of what is loaded.
        kv_tokens: tokens of all sessions together.

    Raises:
        ModelNotFound, InvalidArgument: as :meth:`paceline.models.heads.HeadLibrary.load`; or the
            head reads more of the target than states.
    """
    folder = model_folder(resolve_model(target))
    found = resolve_heads(heads) if heads else heads_folder(folder)
    if dtype not in FLOATS:
        dtype = "float32"  # of activations, whatever the target's weights are
    alone = distant_target(
        folder, dtype=DTYPES[dtype], device=pick_device(device), kv_tokens=kv_tokens
    )
    drafter = DRAFTERS[kind](
        DrafterContext(
            alone.config.vocab_size, _needs_target, _needs_target,
            HeadLibrary(found, folder, alone).load,
        )
    )  # fmt: skip
    assert isinstance(drafter, HeadDrafter)
    return drafter


def _needs_target(*_: object) -> Any:
    raise InvalidArgument("drafter", "one beside the target", "a drafter that can be elsewhere")


def load_translating_drafter(
    path: str | Path,
    target: Tokenizer,
    *,
    dtype: str = "float32",
    device: str = "auto",
    kv_tokens: int | None = None,
) -> OmniDraft:
    """A draft model with another tokenizer than the target's, whose tokenizer is given.

    Args and raises: as :func:`load_drafter`, which wants the same tokenizer.
    """
    path = resolve_model(path)
    runner = _load_draft_runner(path, dtype, device, kv_tokens)
    return OmniDraft(DraftModel(runner), Translator(target, load_tokenizer(path)))


def _load_draft_runner(path: Path, dtype: str, device: str, kv_tokens: int | None) -> ModelRunner:
    if is_foreign(path):
        return GgufRunner(path, kv_tokens=kv_tokens, gpu=pick_device(device) != "cpu")
    if dtype == "float32" and pick_device(device) == "cpu" and kernels.has_dots():
        dtype = "bfloat16"
    return load_runner(
        path, dtype=dtype, device=device, batch_invariant=False, kv_tokens=kv_tokens, int8=True
    )


def _config(path: Path) -> dict[str, Any]:
    """A model's config.json; there is none where llama.cpp computes it."""
    return {} if is_foreign(path) else read_config(model_folder(path))


def load_engine(
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    *,
    dtype: str = "float32",
    device: str = "auto",
    drafter_device: str | None = None,
    batch_invariant: bool | None = None,
    kv_tokens: int | None = None,
    limits: EngineLimits | None = None,
    heads: str | Path | None = None,
    translate: bool = False,
    numerics: str = "fastest",
    adapters: Mapping[str, str | Path] | None = None,
    adapter_drafters: Mapping[str, str | Path] | None = None,
    corpus: Iterable[str] = (),
) -> Engine:
    """An engine over models; without any, over the demo pair.

    Args:
        target, drafter: folders or names of models (:mod:`paceline.model_names`).
        translate: take a drafter with another tokenizer, too; the method `omnidraft` uses it. The
            demo target then has one where ``drafter`` is None.
        drafter_device: where the draft model and heads run (Dovetail runs the target on another
            device than its head); None: where the target does.
        heads: folder with the target's trained heads (:class:`paceline.models.heads.HeadLibrary`),
            or a published drafter's folder or ``hf:`` name; default: the folder ``heads`` in
            the target's, or those that ship for it.
        numerics, adapters: the target's; see :func:`load_runner`.
        adapter_drafters: draft models, as ``drafter``, for sessions with an adapter, by its name;
            ``drafter`` drafts for all others.
        corpus: texts that the methods `sam_decoding`, `sam_token_recycling` and `sam_eagle2` copy
            from, beside the request's own and earlier outputs; 0.4 kB of memory for each token.

    Raises:
        ModelNotFound, InvalidArgument: as :func:`load_runner`.
        TokenizerMismatch: drafter and target do not share a tokenizer, and ``translate`` is False.
    """
    is_named = drafter is not None
    drafter = drafter or default_drafter(target)
    target = model_folder(resolve_model(target or TARGET_DIR))
    drafter = None if drafter is None else resolve_model(drafter)
    runner = load_runner(
        target, dtype=dtype, device=device, batch_invariant=batch_invariant, kv_tokens=kv_tokens,
        numerics=numerics, adapters=adapters,
    )  # fmt: skip
    tokenizer = load_tokenizer(target)
    if tokenizer.vocab_size > runner.vocab_size:
        raise InvalidArgument(
            "tokenizer", f"{target}, with {tokenizer.vocab_size} entries",
            f"at most {runner.vocab_size} entries, which is vocab_size in config.json",
        )  # fmt: skip
    drafters: dict[str, Drafter] = {}
    if drafter is not None:
        where = drafter_device or device
        if kind := masked_kind(drafter):
            drafters[kind] = load_masked_drafter(drafter, target)
        elif translate and tokenizer.vocabulary() != load_tokenizer(drafter).vocabulary():
            drafters["omnidraft"] = load_translating_drafter(
                drafter, tokenizer, dtype=dtype, device=where, kv_tokens=kv_tokens
            )
        else:
            drafters["draft_model"] = load_drafter(
                drafter, target, dtype=dtype, device=where, kv_tokens=kv_tokens
            )
    if adapter_drafters:
        for name in adapter_drafters:
            check_adapter(name, [*(adapters or {})])
        base = drafters.get("draft_model")
        if not isinstance(base, DraftModel):
            names = [*adapter_drafters]
            raise InvalidArgument("adapter_drafters", names, "none without a draft model")
        drafters["draft_model"] = DraftModels(
            base,
            {
                name: load_drafter(
                    folder, target, dtype=dtype, device=drafter_device or device,
                    kv_tokens=kv_tokens,
                )
                for name, folder in adapter_drafters.items()
            },
        )  # fmt: skip
    if translate and target == TARGET_DIR and not is_named:
        drafters["omnidraft"] = load_translating_drafter(
            OWN_TOKENS_DIR, tokenizer, dtype=dtype, device=drafter_device or device,
            kv_tokens=kv_tokens,
        )  # fmt: skip
    if target == TARGET_DIR and "diffuspec" not in drafters:
        drafters["diffuspec"] = load_masked_drafter(DIFFUSION_DIR, target)
    heads = resolve_heads(heads) if heads else heads_folder(target)
    draft_model = drafters.get("draft_model")
    costs = LoadCosts(
        lambda: profile_key(target, drafter, dtype, pick_device(device), numerics),
        runner,
        draft_model if isinstance(draft_model, DraftModel) else None,
    )
    costs.look()
    distant = None
    if pick_device(drafter_device or device) != pick_device(device):
        distant = partial(
            distant_target, target, dtype=DTYPES[dtype if dtype in FLOATS else "float32"],
            device=pick_device(drafter_device or device), kv_tokens=kv_tokens,
        )  # fmt: skip
    give_back()
    engine = Engine(
        ModelTarget(runner),
        drafters,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(target),
        limits=limits,
        length_context=_length_context(target, drafter, heads, costs),
        heads=HeadLibrary(heads, target, runner, distant),
    )
    engine.drafters.corpus = [tokenizer.encode(text, add_special_tokens=False) for text in corpus]
    return engine


def _length_context(
    target: Path, drafter: Path | None, heads: Path, costs: LoadCosts
) -> LengthContext:
    """What the length controllers of an engine over these folders need to know."""
    config = _config(target)
    draft_config = _config(drafter) if drafter is not None else {}

    @cache
    def weights_of(name: str) -> str:
        folder = drafter if name == "draft_model" else heads / name
        return weights_digest(folder) if folder is not None and folder.exists() else ""

    return LengthContext(
        measure=costs,
        heads=heads,
        vocab_size=config.get("vocab_size") or 0,
        target_hidden_size=config.get("hidden_size") or 0,
        drafter_hidden_size=draft_config.get("hidden_size") or 0,
        weights_of=weights_of,
    )
