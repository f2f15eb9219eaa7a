"""Answers compared with solutions by math-verify, in a process of its own that is ended when it takes too long.

math-verify bounds its time by signals, which only a main thread gets and only between two steps of Python: in another
thread it raises, and 9^{9^9} keeps it busy whatever the clock says. The process that this file is when it is run asks
math-verify in its main thread; `verdicts` ends it if it doesn't answer, and starts another.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TextIO

SECONDS = 5
"""Time to read a solution, to read an answer, and to compare the two, each."""
GRACE = 1
"""Seconds that math-verify may take longer than it was given before its process is ended."""
START = 120
"""Seconds for the process to import math-verify."""
MEMORY = 4 << 30
"""Bytes of address space that the process may take."""


class Verdict(NamedTuple):
    """What math-verify said of an answer."""

    reward: float | None
    """1.0 for right, 0.0 for wrong, None where no solution could be read."""
    gold: str
    """The solution as it was read."""
    answer: str
    """The answer as it was read."""


def check_math_verify() -> None:
    """Raises ValueError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "rewards for right answers need math-verify, which is not installed: pip install strop[rewards]"
        )


def prepare() -> None:
    """Start the process, so that the first answer doesn't wait for it. Raises ValueError if math-verify is missing."""
    check_math_verify()
    with _LOCK:
        _PROCESS.ensure()


def verdicts(pairs: Sequence[tuple[str, str]], seconds: float = SECONDS) -> list[Verdict]:
    """For each solution and answer what math-verify says, from any thread; `seconds` bound each of its three tasks."""
    if not pairs:
        return []
    check_math_verify()
    with _LOCK:
        return [_PROCESS.verdict(gold, answer, seconds) for gold, answer in pairs]


class MathProcess:
    """The process, started when it is first asked, and again after it had to be ended."""

    def __init__(self):
        self.process: subprocess.Popen[str] | None = None
        self.replies: queue.Queue[Any] = queue.Queue()
        self.readers: list[threading.Thread] = []
        self.owner = os.getpid()

    def verdict(self, gold: str, answer: str, seconds: float) -> Verdict:
        self.ensure()
        self.send([gold, answer, max(1, round(seconds))])
        parsed = self.reply(seconds + GRACE)
        if not parsed:
            return Verdict(None, "[unparseable]", "[skipped]")
        found = self.reply(2 * seconds + GRACE)
        return Verdict(found[0], parsed, found[1]) if found else Verdict(0.0, parsed, "[ran out of time]")

    def ensure(self) -> None:
        """A process of this one's own is running."""
        if self.owner != os.getpid():
            self.forget()
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self.replies = queue.Queue()
        complaints: list[str] = []
        self.readers = [
            threading.Thread(target=_read, args=(self.process.stdout, self.replies), daemon=True),
            threading.Thread(target=_drain, args=(self.process.stderr, complaints), daemon=True),
        ]
        for thread in self.readers:
            thread.start()
        if self.reply(START) is None:
            raise ValueError(f"math-verify could not be imported in a process of its own: {''.join(complaints)[-500:]}")

    def send(self, request: list[Any]) -> None:
        """A process that ended meanwhile gives no reply, which is noticed there."""
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def reply(self, seconds: float) -> Any:
        """The next reply; None, and no process, if there is none within `seconds`."""
        try:
            reply = self.replies.get(timeout=seconds)
        except queue.Empty:
            reply = None
        if reply is None:
            self.close()
        return reply

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for thread in self.readers:
                thread.join()
            if self.process.stdin is not None:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()
            self.forget()

    def forget(self) -> None:
        """The process stays, but isn't asked again; after a fork it is the parent's."""
        self.process, self.owner = None, os.getpid()


_LOCK = threading.Lock()
_PROCESS = MathProcess()


def _close_at_exit() -> None:
    if _PROCESS.owner == os.getpid():
        _PROCESS.close()


def _renew_after_fork() -> None:
    """A fork copies the lock, held or not, and must not talk to its parent's process."""
    global _LOCK
    _LOCK = threading.Lock()


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


def _read(lines: TextIO, replies: queue.Queue[Any]) -> None:
    with lines, contextlib.suppress(ValueError, OSError):
        for line in lines:
            replies.put(json.loads(line))
    replies.put(None)


def _drain(lines: TextIO, kept: list[str]) -> None:
    with lines, contextlib.suppress(ValueError, OSError):
        for line in lines:
            kept[:] = [*kept[-20:], line]


def serve() -> None:
    """Answer requests, one a line, until there are no more: first the solution as read, "" if it can't be, then the
    reward and the answer as read."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no reply
    _limit_memory()
    read_gold, judge = _comparison()

    def reply(value: Any) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    reply("ready")
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        try:
            parsed = read_gold(gold, seconds)
        except Exception:
            parsed = []
        reply(str(parsed) if parsed else "")
        if parsed:
            try:
                reply(judge(parsed, answer, seconds))
            except Exception as error:
                reply([0.0, f"[{type(error).__name__}]"])


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _comparison() -> tuple[Callable[[str, int], list], Callable[[list, str, int], list]]:
    """How a solution is read, and how an answer is judged by it."""
    from math_verify import LatexExtractionConfig, parse, verify

    strict = replace(LatexExtractionConfig().normalization_config, malformed_operators=False, nits=False)
    latex = LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0, normalization_config=strict)

    def read_gold(text: str, seconds: int) -> list:
        return parse(text, parsing_timeout=seconds)

    def judge(gold: list, text: str, seconds: int) -> list:
        answer = parse(text, [latex], extraction_mode="first_match", parsing_timeout=seconds)
        right = verify(gold, answer, timeout_seconds=seconds)
        return [float(right), str(answer) if answer else "[unparseable]"]

    return read_gold, judge


if __name__ == "__main__":
    serve()
