"""Two network namespaces joined by a veth pair: a client's machine and a server's, on one."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from types import TracebackType
from typing import Self

SERVER, CLIENT = "10.213.0.1", "10.213.0.2"  # their addresses, in a network that exists only here


class CannotMakeNamespaces(Exception):
    """Says why."""


class Namespaces:
    """Both namespaces, which are gone when the block ends.

    Raises:
        CannotMakeNamespaces: no `ip`, or not the rights.
    """

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.server, self.client = f"paceline-s-{tag}", f"paceline-c-{tag}"
        self._veth = f"pls{tag}", f"plc{tag}"

    def set_link(self, *, up: bool) -> None:
        """Pull the server's plug, or put it in again."""
        _ip("-n", self.server, "link", "set", self._veth[0], "up" if up else "down")

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            raise CannotMakeNamespaces("there is no `ip` (package iproute2)")
        if os.geteuid() != 0:
            raise CannotMakeNamespaces("only root can make network namespaces")
        try:
            for name in (self.server, self.client):
                _ip("netns", "add", name)
            here, there = self._veth
            _ip("link", "add", here, "netns", self.server, "type", "veth",
                "peer", "name", there, "netns", self.client)  # fmt: skip
            for name, veth, address in (
                (self.server, here, SERVER), (self.client, there, CLIENT),
            ):  # fmt: skip
                _ip("-n", name, "address", "add", f"{address}/24", "dev", veth)
                for device in ("lo", veth):
                    _ip("-n", name, "link", "set", device, "up")
        except CannotMakeNamespaces:
            self._delete()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._delete()

    def _delete(self) -> None:
        for name in (self.server, self.client):  # the veth pair goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMakeNamespaces(f"`ip {' '.join(words)}`: {done.stderr.strip()}")
