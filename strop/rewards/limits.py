"""Calls bounded in time, and an event loop beside the program."""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Stopped(BaseException):
    """Raised in a thread whose time is over; no `Exception`, so that functions don't swallow it."""


def within(call: Callable[[], Result], seconds: float) -> Result:
    """What `call` returns or raises, in a thread of its own. Raises TimeoutError if it isn't done within `seconds`.

    The thread is then told to stop, which it does at its next step of Python: what hangs outside Python is left behind.
    """
    future: Future[Result] = Future()

    def run() -> None:
        with contextlib.suppress(Stopped):
            try:
                future.set_result(call())
            except Stopped:
                raise
            except BaseException as error:
                future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not future.done():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped))
        raise TimeoutError(f"not done within {seconds:g} s")
    return future.result()


class Threads:
    """Runs so many calls at a time, in threads that the program doesn't wait for when it ends."""

    def __init__(self, count: int):
        self.turns = threading.Semaphore(count)

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            with self.turns:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(call())
                    except BaseException as error:
                        future.set_exception(error)

        threading.Thread(target=run, daemon=True, name="strop-rewards").start()
        return future


class Loop:
    """An event loop that runs in a thread as long as the program does, so that what coroutines keep open stays open."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="strop-rewards-loop").start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(without_exit(coroutine), self.loop)


async def without_exit(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """A SystemExit would end the loop, and leave all who wait for it waiting."""
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
