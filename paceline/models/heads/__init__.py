"""Draft heads: small modules that draft from what the target computed, one file for each paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.errors import InvalidArgument
from paceline.models.base import ModelRunner
from paceline.models.heads.base import Head, HeadTarget, load_head
from paceline.models.heads.blockwise import Blockwise
from paceline.models.heads.chimera import Chimera
from paceline.models.heads.dovetail import Dovetail
from paceline.models.heads.eagle import Eagle
from paceline.models.heads.falcon import Falcon
from paceline.models.heads.fspad import Fspad
from paceline.models.heads.hidden_transfer import HiddenTransfer
from paceline.models.heads.hydra import Hydra, HydraPP
from paceline.models.heads.medusa import Medusa
from paceline.models.heads.moa import MixtureOfAttentions
from paceline.models.heads.ppd import PromptDecoding
from paceline.models.llama import LlamaRunner

HEADS: Mapping[str, type[Head]] = {
    head.kind: head
    for head in (
        Medusa,
        Blockwise,
        Hydra,
        HydraPP,
        Eagle,
        Chimera,
        Fspad,
        Falcon,
        Dovetail,
        MixtureOfAttentions,
        PromptDecoding,
        HiddenTransfer,
    )
}


class HeadLibrary:
    """The heads trained for one target: a folder with a subfolder for each kind.

    Args:
        folder: for example ``heads``, with ``heads/medusa/config.json``; it may be missing.
        target: the target's model folder.
        runner: the loaded target.
    """

    def __init__(self, folder: Path, target: Path, runner: ModelRunner) -> None:
        self.folder = folder
        self._target = target
        self._runner = runner

    def has(self, kind: str) -> bool:
        """Whether the folder has a head of this kind."""
        return (self.folder / kind / "config.json").is_file()

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
        if not isinstance(self._runner, LlamaRunner):
            raise InvalidArgument(
                "method", kind, "a method without a head: heads need the fast path"
            )
        target = HeadTarget.of_runner(self._target, self._runner)
        return load_head(HEADS[kind], self.folder / kind, target)
