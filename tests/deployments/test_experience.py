"""What method auto learns is kept in a file that replicas share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.deployments.experience import ExperienceFile, kept_experience
from paceline.engine import Engine, EngineThread
from paceline.lengths.experience import experience_of
from paceline.request import Request
from paceline.sampling import SamplingParams

FINGERPRINT = "a target"


def fresh(demo: Engine) -> Engine:
    """An engine over the same models that has learnt nothing."""
    engine = demo.sibling()
    assert experience_of(engine.length_context).document()["rates"] == []
    return engine


@pytest.fixture
def replicas(demo: Engine) -> Iterator[list[EngineThread]]:
    threads = [EngineThread(fresh(demo)).start() for _ in range(2)]
    yield threads
    for thread in threads:
        thread.stop()


def generate(thread: EngineThread) -> None:
    request = Request(
        (1, 2, 3, 1, 2), SamplingParams(max_tokens=64), SpeculationConfig(method="auto")
    )
    thread.call(lambda engine: engine.generate([request.prompt_ids], request.params,
                                               request.speculation)).result(60)  # fmt: skip


def known(thread: EngineThread) -> dict[str, object]:
    return thread.call(lambda engine: experience_of(engine.length_context).document()).result(10)


def test_a_replica_learns_what_another_one_has_written(
    own_cache: Path, replicas: list[EngineThread]
) -> None:
    first, second = replicas
    files = [ExperienceFile.of_thread(thread, FINGERPRINT) for thread in replicas]
    generate(first)
    files[0].exchange()
    assert known(second)["rates"] == []
    files[1].exchange()
    assert known(second)["rates"] == known(first)["rates"] != []
    before = known(second)
    for _ in range(3):  # nothing new: nothing counts twice
        files[1].exchange()
    assert known(second) == before


def test_a_first_start_begins_with_what_a_sweep_has_learnt(
    own_cache: Path, replicas: list[EngineThread]
) -> None:
    first, second = replicas
    generate(first)
    learnt = json.dumps(known(first))
    ExperienceFile.of_thread(second, FINGERPRINT, learnt).exchange()
    assert known(second) == known(first)
    before = known(second)
    # After a restart it is in the file, and counts no second time.
    again = ExperienceFile.of_thread(second, FINGERPRINT, learnt)
    again._written = again.path.read_text()
    again.exchange()
    assert known(second) == before


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 7}'])
def test_a_damaged_file_is_replaced(
    own_cache: Path, replicas: list[EngineThread], content: str
) -> None:
    file = ExperienceFile.of_thread(replicas[0], FINGERPRINT)
    file.path.parent.mkdir(parents=True)
    file.path.write_text(content)
    generate(replicas[0])
    file.exchange()
    assert json.loads(file.path.read_text()) == known(replicas[0])


def test_a_folder_that_cannot_be_written_costs_nothing_else(
    own_cache: Path, replicas: list[EngineThread], caplog: pytest.LogCaptureFixture
) -> None:
    (own_cache / "paceline" / "experience").write_text("a file where the folder should be")
    file = ExperienceFile.of_thread(replicas[0], FINGERPRINT)
    file.exchange()
    file.exchange()
    assert caplog.text.count("starts anew after a restart") == 1


def test_the_last_exchange_comes_when_it_is_stopped(
    own_cache: Path, replicas: list[EngineThread]
) -> None:
    async def serve() -> ExperienceFile:
        file = ExperienceFile.of_thread(replicas[0], FINGERPRINT)
        task = asyncio.create_task(file.run())
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(file.path.exists):  # noqa: ASYNC110  # another's file
                await asyncio.sleep(0.01)
        await asyncio.to_thread(generate, replicas[0])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return file

    file = asyncio.run(serve())
    assert json.loads(file.path.read_text())["rates"]


def test_an_engine_without_a_server_goes_on_where_the_last_one_ended(
    own_cache: Path, demo: Engine
) -> None:
    learnt = []
    for _ in range(2):
        engine = fresh(demo)
        with kept_experience(engine, SpeculationConfig(method="auto")):
            learnt.append(experience_of(engine.length_context).document()["rates"])
            engine.generate([(1, 2, 3, 1, 2)], SamplingParams(max_tokens=64),
                            SpeculationConfig(method="auto"))  # fmt: skip
    assert learnt[0] == [] != learnt[1]
    (file,) = (own_cache / "paceline" / "experience").glob("*.json")
    before = file.read_text()
    with kept_experience(engine, SpeculationConfig(method="ar")):  # learns nothing
        pass
    assert file.read_text() == before


def test_a_sweeps_experience_counts_once_where_no_file_can_be_written(
    own_cache: Path, replicas: list[EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    first, second = replicas
    generate(first)
    monkeypatch.setattr(Path, "write_text", full)
    file = ExperienceFile.of_thread(second, FINGERPRINT, json.dumps(known(first)))
    for _ in range(2):
        file.exchange()
    assert known(second) == known(first)
