"""Draft heads: small modules that draft from what the target computed, one file for each paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.model_names import SHIPPED_HEADS
from paceline.models.base import ModelRunner
from paceline.models.heads.base import Head, HeadTarget, load_head, target_identity
from paceline.models.heads.blockwise import Blockwise
from paceline.models.heads.chimera import Chimera
from paceline.models.heads.dflash import DFlash
from paceline.models.heads.dflash2 import DFlash2
from paceline.models.heads.dovetail import Dovetail
from paceline.models.heads.dspark import DSpark
from paceline.models.heads.eagle import Eagle
from paceline.models.heads.eagle3 import Eagle3
from paceline.models.heads.falcon import Falcon
from paceline.models.heads.fspad import Fspad
from paceline.models.heads.hidden_transfer import HiddenTransfer
from paceline.models.heads.hydra import Hydra, HydraPP
from paceline.models.heads.linearized import Linearized
from paceline.models.heads.longspec import LongSpec
from paceline.models.heads.medusa import Medusa
from paceline.models.heads.moa import MixtureOfAttentions
from paceline.models.heads.mtp import Mtp
from paceline.models.heads.peagle import PEagle
from paceline.models.heads.ppd import PromptDecoding
from paceline.models.heads.published import (
    Published,
    find_published,
    load_published,
    mtp_layer_in,
    published_in,
)
from paceline.models.heads.xpress import XPress
from paceline.models.layouts import read_config
from paceline.models.llama import LlamaRunner
from paceline.models.transformers import TransformersRunner

HEADS: Mapping[str, type[Head]] = {
    head.kind: head
    for head in (
        Medusa,
        Blockwise,
        Hydra,
        HydraPP,
        Eagle,
        Eagle3,
        PEagle,
        Mtp,
        DFlash,
        DFlash2,
        DSpark,
        XPress,
        Chimera,
        Fspad,
        Falcon,
        Dovetail,
        MixtureOfAttentions,
        LongSpec,
        Linearized,
        PromptDecoding,
        HiddenTransfer,
    )
}


def heads_folder(target: Path) -> Path:
    """Where a model's heads are: in its own folder, or among those that ship with the package."""
    own = target / "heads"
    if not own.is_dir():
        for shipped in SHIPPED_HEADS:
            if _made_for(target, shipped):
                return shipped
    return own


def _made_for(target: Path, heads: Path) -> bool:
    try:
        config = read_config(target)
    except ModelNotFound:
        return False
    for file in sorted(heads.glob("*/config.json")):
        trained = json.loads(file.read_text()).get("target") or {}
        if "identity" in trained:
            sizes = (config.get("hidden_size"), config.get("vocab_size"))
            return (trained["hidden_size"], trained["vocab_size"]) == sizes and trained[
                "identity"
            ] == target_identity(target)
    return False


def load_any_head(folder: Path, target: HeadTarget) -> Head:
    """A head from its folder, ready to draft for ``target``: Paceline's own or a published one.

    Raises:
        ModelNotFound: something in the folder is missing or damaged.
        InvalidArgument: it holds no head, or one for another target.
    """
    found = find_published(folder)
    if found is not None:
        return load_published(found, target)
    kind = str(read_config(folder).get("kind"))
    if kind not in HEADS:
        raise InvalidArgument("head", str(folder), "the folder of a trained head")
    return load_head(HEADS[kind], folder, target)


class HeadLibrary:
    """The heads trained for one target: a folder with a subfolder for each kind.

    A published checkpoint may stand in the place of a head of its kind, and an MTP layer may be in
    the target's own checkpoint.

    Args:
        folder: for example ``heads``, with ``heads/medusa/config.json``; it may be missing.
        target: the target's model folder.
        runner: the loaded target, or those parts of it that heads use.
        distant: loads these parts for another device than the target's, where heads are to draft;
            None: they draft where the target is.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        runner: ModelRunner | HeadTarget,
        distant: Callable[[], HeadTarget] | None = None,
    ) -> None:
        self.folder = folder
        self._target = target
        self._runner = runner
        self._distant = distant

    def has(self, kind: str) -> bool:
        """Whether the folder has a head of this kind, Paceline's own or a published one."""
        return self._own(kind) or self._published(kind) is not None

    def _own(self, kind: str) -> bool:
        file = self.folder / kind / "config.json"
        return file.is_file() and find_published(file.parent) is None

    def _published(self, kind: str) -> Published | None:
        found = next((found for found in published_in(self.folder) if found.kind == kind), None)
        return self._inside if found is None and kind == "mtp" else found

    @cached_property
    def _inside(self) -> Published | None:
        return mtp_layer_in(self._target)

    @cached_property
    def _parts(self) -> HeadTarget:
        """Of the target, on the other device; all heads share them."""
        assert self._distant is not None
        return self._distant()

    def load(self, kind: str) -> Head:
        """A head, ready to draft.

        Raises:
            InvalidArgument: the folder has no such head, or one for another target.
            ModelNotFound: its folder is damaged.
        """
        if not self.has(kind):
            raise InvalidArgument(
                "method", kind, f"a method whose head is in {self.folder}: `paceline train {kind}` "
                "makes one",
            )  # fmt: skip
        if not isinstance(self._runner, LlamaRunner | TransformersRunner | HeadTarget):
            raise InvalidArgument("method", kind, "a method without a head: this target gives none")
        target = self._parts if self._distant is not None else self._runner
        if not isinstance(target, HeadTarget):
            target = HeadTarget.of_runner(self._target, target)
        if self._own(kind):
            return load_head(HEADS[kind], self.folder / kind, target)
        found = self._published(kind)
        assert found is not None
        return load_published(found, target)
