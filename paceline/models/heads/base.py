"""Draft heads: small modules that draft from what the target computed.

A head is trained for one target and lives in a folder of its own: ``config.json`` (its kind, its
numbers, its target) and ``model.safetensors``. :class:`paceline.drafters.head.HeadDrafter` runs it
in the decode loop, ``paceline train`` trains it.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline import gguf_folder
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.heads.shortlist import FILE as SHORTLIST_FILE
from paceline.models.heads.shortlist import LowRankLogits, read_shortlist
from paceline.models.heads.storage import pack, unpack
from paceline.models.layouts import INDEX, read_config, stored_tensors
from paceline.models.llama import LlamaRunner
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import read_floats, stored_weights
from paceline.models.packing import Weight
from paceline.models.torch_ops import finished
from paceline.models.transformers import TransformersRunner
from paceline.sampling import argmax_rows
from paceline.types import FloatArray, IntArray, Need

Frontier = Sequence[tuple[int, int, int]]
"""Nodes to expand: ``(node, token_id, parent)``, as in ``paceline.shapes.base.Expander``."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadTarget:
    """The target's parts that heads use: its sizes, its embedding, its head. All frozen.

    Attributes:
        identity: names the weights and the tokenizer; a head fits one identity.
        embedding: of every token, as layers read it.  # [vocab_size, hidden_size]
        lm_head: weight of the output layer.  # [vocab_size, hidden_size]
        fast_logits: the same product on the target's own kernels, without gradients.
        packed_lm_head: ``lm_head`` in the layout of these kernels.
        kv_tokens: maximum number of tokens of all the target's sessions together.
        folder: folder of its weights.
        model: of ``transformers``, of a target on the general path.
    """

    identity: str
    config: LlamaConfig
    embedding: Tensor
    lm_head: Tensor
    fast_logits: Callable[[Tensor], Tensor] | None = None
    packed_lm_head: Weight | None = None
    kv_tokens: int | None = None
    folder: Path | None = None
    model: Any = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of tokens.  # [...] -> [..., hidden_size]"""
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after the final norm, from the target's output layer.

        # [..., hidden_size] -> [..., vocab_size]
        """
        if self.fast_logits is not None and not torch.is_grad_enabled():
            return self.fast_logits(hidden.reshape(-1, hidden.shape[-1])).view(
                *hidden.shape[:-1], -1
            )
        product, differs = F.linear(hidden, self.lm_head), self.config.differs
        return finished(product, differs) if differs.finishes_logits else product

    @staticmethod
    def from_folder(
        folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> HeadTarget:
        """The parts of a target on disk, for training; no other weights are read.

        Raises:
            ModelNotFound, InvalidArgument: the folder is no Llama-type checkpoint.
        """
        config = LlamaConfig.from_folder(folder)
        tensors = stored_weights(folder, config)
        embedding = read_floats(tensors["model.embed_tokens.weight"]).to(device, dtype)
        tied = config.tie_word_embeddings
        lm_head = embedding if tied else read_floats(tensors["lm_head.weight"]).to(device, dtype)
        if config.differs.embedding_scale != 1.0:
            scale = torch.tensor(config.differs.embedding_scale, dtype=dtype)
            embedding = embedding * scale.to(device)
        return HeadTarget(target_identity(folder), config, embedding, lm_head, folder=folder)

    @staticmethod
    def of_runner(folder: Path, runner: LlamaRunner | TransformersRunner) -> HeadTarget:
        """The parts of a loaded target."""
        identity = target_identity(folder)
        if isinstance(runner, TransformersRunner):
            parts = runner.output_layer
            return HeadTarget(
                identity, parts.config, parts.embedding, parts.lm_head, parts.logits,
                kv_tokens=runner.kv_capacity, folder=folder, model=runner.model,
            )  # fmt: skip
        return HeadTarget(
            identity, runner.config, runner.embedding, runner.lm_head, runner.logits_of_hidden,
            runner.packed_lm_head, runner.kv_capacity, folder,
        )  # fmt: skip

    def among_all(self, some: Tensor, vocabulary: Tensor | None) -> Tensor:
        """Logits of all tokens, from those that a head drafts among.

        Args:
            some: logits.  # [..., n]
            vocabulary: their tokens (None: all, in order).  # [n]

        Returns:
            The others are minus infinity.  # [..., vocab_size]
        """
        if vocabulary is None:
            return some
        every = some.new_full((*some.shape[:-1], self.config.vocab_size), float("-inf"))
        every[..., vocabulary] = some
        return every


def _telling_vectors(folder: Path) -> list[Tensor]:
    """Vectors of a checkpoint that any training changes: the final norm, or all that it has."""
    name = "model.norm.weight"
    if gguf_folder.is_folder(folder):
        return [read_floats(gguf_folder.tensors(folder)[name])]
    if not (folder / INDEX).is_file() and not (folder / "model.safetensors").is_file():
        return []  # a checkpoint of pickles
    stored = stored_tensors(folder)
    vectors = [each for each in sorted(stored) if len(stored[each].shape) == 1]
    return [stored[each].read() for each in ([name] if name in stored else vectors)]


def target_identity(folder: Path) -> str:
    """A name for the weights and the tokenizer in a model folder.  # 16 hex digits

    It is made from the final norm, which any training changes, the sizes and the tokenizer; of a
    checkpoint with other names, from all vectors among its tensors.
    """
    inside = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    files = [(file, file.stat()) for file in inside if file.is_file()]
    return _identity(folder, tuple((file, at.st_mtime_ns, at.st_size) for file, at in files))


@lru_cache(16)  # a tokenizer of 49,152 entries takes half a second
def _identity(folder: Path, files: tuple[tuple[Path, int, int], ...]) -> str:
    """As :func:`target_identity`; ``files``: the folder's, with time and size."""
    digest = hashlib.sha256()
    config = read_config(folder)
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        digest.update(f"{key}={config.get(key)};".encode())
    for vector in _telling_vectors(folder):
        digest.update(vector.float().numpy().tobytes())
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        vocabulary = json.loads(tokenizer.read_text()).get("model", {}).get("vocab", {})
        digest.update(json.dumps(vocabulary, sort_keys=True).encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class HeadBatch:
    """Text, and what the target computes for it.

    Attributes:
        token_ids: # int64 [batch, length]
        hidden: after the final norm.  # [batch, length, hidden_size]
        logits: of the target after each token.  # [batch, length, vocab_size]
        layer_states: residual stream after each layer, for heads that need LAYER_STATES.
            # [batch, length, num_layers, hidden_size]
        generator: the only source of randomness in a loss.
        counts: the places after which the next token has a loss; None: all.
            # bool [batch, length]
    """

    token_ids: Tensor
    hidden: Tensor
    logits: Tensor
    layer_states: Tensor | None
    generator: torch.Generator
    counts: Tensor | None = None

    def counts_from(self, first: int, last: int | None = None) -> Tensor | None:
        """``counts`` of the places from ``first`` on, up to ``last``."""
        return None if self.counts is None else self.counts[:, first:last]


State = Any
"""A head's state for a session."""


class Head(nn.Module, ABC):
    """A draft head; also the :class:`paceline.shapes.base.Expander` behind it.

    A subclass has a frozen dataclass ``Options`` of plain numbers with defaults, and is made as
    ``cls(target, options)``. Parameters of the target are no parameters of the head.

    Attributes:
        kind: name in ``HEADS``, in folders and on the command line.
        needs: ``HIDDEN_STATES`` or ``LAYER_STATES``: what its features are.
        training_needs: what its loss needs beside those.
        drafts_on: drafts may go on behind tokens whose features it does not have, however many:
            nodes have any number and depth, and read nothing of the target behind the features.
        last_acceptance: of a head that estimates it: how likely the target accepts a token drawn
            from each row of its last answer.  # [num_rows]
        shortlist: of a loaded head, if one lies beside its weights; ``eagle3`` uses it.
    """

    last_acceptance: FloatArray | None = None
    shortlist: LowRankLogits | None = None
    kind: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset({Need.HIDDEN_STATES})
    training_needs: ClassVar[frozenset[Need]] = frozenset()
    drafts_on: ClassVar[bool] = False
    Options: ClassVar[type[Any]]

    def __init__(self, target: HeadTarget, options: Any) -> None:
        super().__init__()
        self.target = target
        self.options = options

    @classmethod
    def made(cls, target: HeadTarget, options: Any) -> Head:
        """The head that ``options`` describe; a kind may have several classes."""
        return cls(target, options)

    # --- training ------------------------------------------------------------------------------

    def bind(self, folder: Path) -> None:
        """Load the parts of the target in ``folder`` that the loss needs; called once, before
        training."""

    @abstractmethod
    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The training loss, and numbers to plot.

        These include ``agreement`` [depth]: how often the head's first guess for each depth is the
        target's argmax there, given the true tokens before it.
        """

    # --- drafting ------------------------------------------------------------------------------

    @property
    def max_depth(self) -> int | None:
        """Maximum depth of its drafts; None for any depth."""
        return None

    def prepare(self) -> None:
        """Pack the weights for drafting; called once after loading."""

    @property
    def feature_layers(self) -> Sequence[int] | None:
        """Numbers of the target's layers whose states a feature joins, from 1.

        None: a feature is all that the target computes for a token, as it is.
        """
        return None

    def select(self, computed: Tensor) -> Tensor:
        """The features in what the target computed, which are kept until the next draft.

        # [n, ...] -> [n, ...]
        """
        numbers = self.feature_layers
        if numbers is None:
            return computed
        # Three times as fast as one index of them all, on a CPU.
        return torch.cat([computed[..., number - 1, :] for number in numbers], -1)

    @abstractmethod
    def new_state(self) -> State:
        """The state of a new session."""

    def free(self, state: State) -> None:
        """Free the state of a session that ends."""

    def adopt(self, state: State, token_ids: Sequence[int], scope: Hashable) -> int:
        """Begin a new state with what :meth:`publish` has kept of these tokens.

        Returns:
            How many of their features it need not read.
        """
        return 0

    def num_known(self, token_ids: Sequence[int], scope: Hashable) -> int:
        """How many of their features :meth:`adopt` would not need."""
        return 0

    def publish(self, state: State, token_ids: Sequence[int], scope: Hashable) -> None:
        """Keep what the state has of a session's first tokens, for later sessions of the scope."""

    @abstractmethod
    def root(
        self,
        states: Sequence[State],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        """Logits of the token after the last committed one.  # [num_sessions, vocab_size]

        Args:
            features: of the tokens committed since the last call, for each session at least one,
                as :meth:`select` returns them.  # [n, hidden_size] or [n, num_layers, hidden_size]
            token_ids: the token that follows each of them; the last is the last committed token,
                for which there are no features yet.  # [n]
        """

    def chains(
        self,
        states: Sequence[State],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
        depth: int,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        """As :meth:`root`, and chains by argmax behind it.

        Args:
            stop_below: a chain ends after a token whose probability is less than this.
                # [depth, num_sessions]

        Returns:
            -1 behind the end of a chain.  # [num_sessions, depth]
        """
        logits = self.root(states, features, token_ids)
        first = argmax_rows(logits)
        if stop_below is None:
            return self.greedy_chains(states, first, depth)
        unsure = self.confidence(logits) < stop_below[0]
        chains = (
            np.array([first] * depth, np.int64).T if unsure.all()
            else self.greedy_chains(states, first, depth, stop_below[1:])
        )  # fmt: skip
        chains[unsure, 1:] = -1
        return chains

    @abstractmethod
    def expand(self, states: Sequence[State], frontiers: Sequence[Frontier]) -> Tensor:
        """Logits after new nodes of the drafts that ``root`` began.  # [num_nodes, vocab_size]"""

    def greedy_chains(
        self,
        states: Sequence[State],
        first: Sequence[int],
        depth: int,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        """Chains by argmax, after ``root``. A head with a faster way than ``expand`` overrides it.

        Args:
            first: the first token of each chain.
            stop_below: a chain ends after a later token whose probability is less than this.
                # [depth - 1, num_sessions]

        Returns:
            -1 behind the end of a chain.  # [num_sessions, depth]
        """
        steps, unsure = [list(first)], []
        for node in range(depth - 1):
            logits = self.expand(states, [[(node, token, node - 1)] for token in steps[-1]])
            steps.append(argmax_rows(logits))
            if stop_below is not None:
                unsure.append(self.confidence(logits) < stop_below[node])
        return cut_chains(np.array(steps, np.int64).T, unsure)

    def confidence(self, logits: Tensor) -> FloatArray:
        """How sure the head is of the best token of each row of its last answer.

        # [num_rows, vocab_size] -> [num_rows]
        """
        return confidence(logits) if self.last_acceptance is None else self.last_acceptance

    # --- on disk -------------------------------------------------------------------------------

    def save(self, folder: Path, *, int8: bool = False) -> None:
        """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

        Parameters are rounded to bfloat16: it halves the file, and a draft changes no output.

        Args:
            int8: round matrices to eight bits, with a scale for each row.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.cpu().contiguous() for name, value in self.state_dict().items()}
        for name, parameter in self.named_parameters():
            tensors |= pack(name, parameter.detach(), int8=int8)
        (folder / SHORTLIST_FILE).unlink(missing_ok=True)  # of other weights
        part = folder / "model.safetensors.tmp"
        save_file(tensors, part)
        part.replace(folder / "model.safetensors")
        target = self.target.config
        text = json.dumps(
            {
                "kind": self.kind,
                "options": asdict(self.options),
                "target": {
                    "identity": self.target.identity,
                    "hidden_size": target.hidden_size,
                    "num_layers": target.num_layers,
                    "vocab_size": target.vocab_size,
                },
            },
            indent=2,
        )
        part = folder / "config.json.tmp"
        part.write_text(text + "\n")
        part.replace(folder / "config.json")


def load_head(cls: type[Head], folder: Path, target: HeadTarget) -> Head:
    """A head from its folder, ready to draft for ``target``.

    Raises:
        ModelNotFound: the folder, or something in it, is missing or damaged.
        InvalidArgument: it is of another kind, or was trained for another target.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_config(folder)
    try:
        kind, options, trained = config["kind"], cls.Options(**config["options"]), config["target"]
        sizes = {key: trained[key] for key in ("hidden_size", "num_layers", "vocab_size")}
        identity = trained["identity"]
    except (KeyError, TypeError) as error:
        raise ModelNotFound(f"{folder}/config.json does not describe a head: {error}") from error
    if kind != cls.kind:
        raise InvalidArgument("head", f"{folder}, a {kind} head", f"a {cls.kind} head")
    for key, there in sizes.items():
        here = getattr(target.config, key)
        if there != here:
            raise InvalidArgument(
                "head", f"{folder}, for a target with {key} {there}",
                f"a head for the loaded target, whose {key} is {here}",
            )  # fmt: skip
    if identity != target.identity:
        raise InvalidArgument(
            "head", f"{folder}, for target {identity}",
            f"a head for the loaded target, {target.identity}: same sizes, but other weights or "
            "another tokenizer",
        )  # fmt: skip
    head = cls.made(target, options)
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ModelNotFound(f"head folder {str(folder)!r} has no model.safetensors")
    try:
        head.load_state_dict(unpack(load_file(str(file))))
    except (SafetensorError, OSError) as error:
        raise ModelNotFound(f"{file} is damaged: {error}") from error
    except RuntimeError as error:
        raise ModelNotFound(f"{file} does not fit its config.json: {error}") from error
    head.to(target.embedding.device, target.embedding.dtype).requires_grad_(False)
    head.eval()
    head.shortlist = read_shortlist(folder)
    head.prepare()
    return head


def reading(weight: Tensor, *, rounded: bool) -> Tensor:
    """A weight that reads features, as a head drafts with it: rounded to bfloat16's precision.

    Not to eight bits: a residual stream has a few enormous numbers, which would leave no precision
    for the others.
    """
    weight = weight.detach().contiguous()
    return weight.bfloat16().to(weight.dtype) if rounded else weight


def check_vocabulary(count: int, size: int) -> None:
    """Refuse an option ``vocabulary`` that is not from 0 to ``size``."""
    if not 0 <= count <= size:
        allowed = f"from 0 to the number of tokens, {size}"
        raise InvalidArgument("vocabulary", count, allowed)


def confidence(logits: Tensor) -> FloatArray:
    """Probability of the best token of each row.  # [num_rows, vocab_size] -> [num_rows]"""
    logits = logits.float()
    result: FloatArray = (logits.amax(-1) - logits.logsumexp(-1)).exp().cpu().numpy()
    return result


def cut_chains(chains: IntArray, unsure: Sequence[NDArray[np.bool_]]) -> IntArray:
    """Put -1 behind the first unsure token of each chain.

    Args:
        chains: # [num_chains, depth]
        unsure: of the tokens but the first; or none.  # [depth - 1, num_chains]
    """
    if len(unsure):
        ended = np.logical_or.accumulate(unsure).T[:, :-1]  # before a chain's third token, and on
        chains[:, 2:][ended] = -1
    return chains


def draw(count: int, generator: torch.Generator) -> int:
    """A random integer below ``count``."""
    return int(torch.randint(count, (), generator=generator, device=generator.device))


def mean_over(values: Tensor, counts: Tensor | None) -> Tensor:
    """The mean over the places that count; 0 if none does.  # scalar

    Args:
        values: # [*places, ...]
        counts: None: all.  # bool [*places]
    """
    if counts is None:
        return values.mean()
    chosen = values[counts]
    return chosen.mean() if chosen.numel() else chosen.sum()


def soft_cross_entropy(
    logits: Tensor, target_logits: Tensor, counts: Tensor | None = None
) -> Tensor:
    """Cross-entropy against the target's distribution, averaged over places.  # scalar

    # [*places, vocab_size], [*places, vocab_size], bool [*places]
    """
    q = target_logits.detach().float().softmax(-1)
    return mean_over(-(q * logits.float().log_softmax(-1)).sum(-1), counts)


def text_cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor | None = None) -> Tensor:
    """Cross-entropy against the text, averaged over places.  # scalar

    # [batch, n, vocab_size], int64 [batch, n], bool [batch, n]
    """
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return mean_over(each.view(labels.shape), counts)


def shifted_agreement(
    logits: Tensor, target_logits: Tensor, ahead: int, counts: Tensor | None = None
) -> Tensor:
    """How often a guess made ``ahead`` tokens early is the target's argmax.  # scalar

    Args:
        logits: the guess at each place for the token ``ahead + 1`` places on.
            # [batch, length, vocab_size]
        target_logits: of the target after each token.  # [batch, length, vocab_size]
        counts: see :class:`HeadBatch`.
    """
    length = target_logits.shape[1] - ahead
    guesses = logits[:, :length].argmax(-1)
    right = (guesses == target_logits[:, ahead:].argmax(-1)).float()
    return mean_over(right, None if counts is None else counts[:, ahead:])
