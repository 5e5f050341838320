"""Session ids that name their target: who made them, whose they are, and with which keys."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.deployments import session_ids
from paceline.deployments.session_ids import KeyFile, SessionIds, SessionPlace, read_keys
from paceline.errors import InvalidArgument

OLD, NEW = b"o" * 32, b"n" * 32


@pytest.mark.parametrize("owner", [None, "", "alice", "é" * 64])
@pytest.mark.parametrize("address", ["127.0.0.1:50051", "[2001:db8::17]:8", "replica-3.pool:65535"])
async def test_an_id_names_its_target_and_its_owner(owner: str | None, address: str) -> None:
    """Also at a gateway that has the key and nothing else, such as one that has restarted."""
    made = SessionIds([OLD]).make(address, owner)
    assert await SessionIds([OLD]).find(made, owner) == SessionPlace(address, True)
    for other in {None, "", "alice", "bob"} - {owner}:
        assert await SessionIds([OLD]).find(made, other) == SessionPlace(address, False)


async def test_ids_are_unlike_one_another() -> None:
    """Nobody can tell from two ids that one tenant has both."""
    ids = SessionIds([OLD])
    made = [base64.urlsafe_b64decode(ids.make("a:1", "alice") + "==") for _ in range(64)]
    for i in range(1, 1 + 12 + 8):  # nonce and tag
        assert len({each[i] for each in made}) > 8


async def test_what_is_changed_anywhere_is_not_an_id() -> None:
    ids = SessionIds([OLD])
    made = ids.make("127.0.0.1:50051", "alice")
    for i, character in enumerate(made):
        for other in {"A", "B", "_", "="} - {character}:
            assert await ids.find(made[:i] + other + made[i + 1 :], "alice") is None
    for broken in ("", made[:-1], made + "A", made + "=", " " + made, made[4:], "x" * 10_000, "é"):
        assert await ids.find(broken, "alice") is None
    assert await SessionIds([NEW]).find(made, "alice") is None


async def test_a_key_signs_until_there_is_a_newer_one_and_is_accepted_until_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_ids, "REFRESH_S", 0.0)
    keys: Sequence[bytes] = (OLD,)

    async def source() -> Sequence[bytes]:
        return keys

    ids = SessionIds(keys, source)
    old = ids.make("a:1", None)
    keys = (NEW, OLD)
    other = SessionIds(keys).make("a:1", None)  # by a gateway that has the new one already
    assert await ids.find(other, None) is not None
    assert await SessionIds([NEW]).find(ids.make("a:1", None), None) is not None
    assert await ids.find(old, None) is not None
    keys = (NEW,)
    await ids.refresh()
    assert await ids.find(old, None) is None


async def test_unknown_ids_do_not_make_a_gateway_ask_again_and_again() -> None:
    count = 0

    async def source() -> Sequence[bytes]:
        nonlocal count
        count += 1
        return (OLD,)

    ids, unknown = SessionIds([OLD], source), SessionIds([NEW])
    for _ in range(50):
        assert await ids.find(unknown.make("a:1", None), None) is None
    assert count == 1


async def test_keys_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_ids, "REFRESH_S", 0.0)
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "keys"
    file.write_text(f"# made with openssl rand -hex 32\n\n{'s' * 64}\n")
    ids = KeyFile(file).session_ids()
    made = ids.make("a:1", None)
    file.write_text(f"{'t' * 64}\n{'s' * 64}\n")
    newer = KeyFile(file).session_ids().make("a:1", None)
    assert await ids.find(newer, None) is not None
    assert await ids.find(made, None) is not None
    file.write_text("short-but-secret\n")
    await ids.refresh()
    assert await ids.find(made, None) is not None  # the keys stay as they were
    assert "gateway.session_keys" in caplog.text
    for text in (caplog.text, repr(ids), repr(vars(ids).keys())):
        for secret in ("short-but-secret", "s" * 32, "t" * 32):
            assert secret not in text


@pytest.mark.parametrize("text", ["", "# none\n", "too-short\n", "k" * 32 + "\nshort\n", "\xff"])
def test_a_file_that_is_no_use_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match=str(file)) as caught:
        read_keys(file)
    assert caught.value.field == "gateway.session_keys"
    assert "too-short" not in str(caught.value)
    with pytest.raises(InvalidArgument, match="No such file"):
        read_keys(tmp_path / "missing")
