"""Events from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.engine import RoundEvent
from rpc.bridge import hand_over


def event(number: int) -> RoundEvent:
    return cast(RoundEvent, number)  # nobody looks into it on the way


async def test_events_of_many_threads_arrive_in_order_and_on_the_loop() -> None:
    loop, count, num_threads = asyncio.get_running_loop(), 500, 4
    got: list[list[Any]] = [[] for _ in range(num_threads)]
    seen: set[threading.Thread] = set()
    done = asyncio.Event()

    def handler(place: int) -> Any:
        def take(number: Any) -> None:
            got[place].append(number)
            seen.add(threading.current_thread())
            if sum(map(len, got)) == num_threads * count:
                done.set()

        return take

    def run(post: Any) -> None:
        for number in range(count):
            post(event(number))

    posts = [hand_over(loop, handler(i)) for i in range(num_threads)]
    threads = [threading.Thread(target=run, args=(post,)) for post in posts]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(20):
        await done.wait()
    assert got == [list(range(count))] * num_threads
    assert seen == {threading.current_thread()}
    for thread in threads:
        thread.join()


async def test_a_handler_that_fails_is_reported_and_holds_nobody_up() -> None:
    loop = asyncio.get_running_loop()
    reported: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    done = asyncio.Event()

    def broken(number: Any) -> None:
        raise ValueError(number)

    hand_over(loop, broken)(event(1))
    hand_over(loop, lambda _: done.set())(event(2))
    async with asyncio.timeout(20):
        await done.wait()
    assert [str(error) for error in reported] == ["1"]


def test_a_closed_loop_hears_nothing_and_leaves_no_file_open() -> None:
    files = Path("/proc/self/fd")
    if not files.is_dir():
        pytest.skip("counts open files where Linux lists them")
    hand_over(loop := asyncio.new_event_loop(), print)(event(0))
    loop.close()
    gc.collect()
    before = len(os.listdir(files))
    for _ in range(20):
        loop = asyncio.new_event_loop()
        got: list[Any] = []
        post = hand_over(loop, got.append)
        post(event(1))
        loop.run_until_complete(asyncio.sleep(0.001))
        assert got == [1]
        loop.close()
        post(event(2))
        assert got == [1]
        del loop, post
    gc.collect()
    assert len(os.listdir(files)) <= before
