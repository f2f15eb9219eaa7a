"""Rewards for programs that pass tests, each run in a sandbox."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from textwrap import dedent
from typing import Any, Literal

from strop.rewards.formats import FENCE
from strop.rewards.sandbox import Limits, Sandbox
from strop.rewards.texts import Words, texts_of

Test = str | Mapping[str, str]
"""An assert, or other statements that raise if a program is wrong; or {"input": ..., "output": ...}."""

HARNESS = """\
def stages():
    import os, sys
    program, tests, word = eval(sys.stdin.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    write, flush, show = sys.__stdout__.write, sys.__stdout__.flush, sys.__stderr__.write
    compiled = []
    for number, test in enumerate(tests):
        try:
            compiled.append((number, compile(test, f"test {number}", "exec")))
        except Exception as error:
            show(f"test {number}: {type(error).__name__}: {error}\\n")
    yield compile(program, "program.py", "exec"), []
    for number, test in compiled:
        failures = []
        yield test, failures
        if failures:
            show(f"test {number}: {failures}\\n")
        else:
            write(f"\\n{word} {number}\\n")
        flush()


def run(exec=exec, space=globals()):
    number = -1
    for code, failures in stages():
        number += 1
        try:
            exec(code, space)
        except BaseException as error:
            failures.append((type(error).__name__, str(error)[:200]))
            if not number:
                raise


run()
"""
"""Runs a program and then its tests; each that passes is reported by a word that the program was not told, so that
ending early, or printing what looks like success, passes nothing. While a program runs, the word is in no frame that
it was called from, nothing is left to read, and what it makes of builtins is too late."""


def program_in(text: str) -> str:
    """The program in an answer: its last fenced block, or all of it where there is none."""
    blocks = FENCE.findall(text)
    return dedent(blocks[-1]) if blocks else text


@dataclass(frozen=True)
class _CodeReward:
    column: str
    partial_credit: bool
    sandbox: Sandbox
    workers: int

    __name__ = "code_reward"

    def __call__(self, completions: Sequence[Words], **columns: Any) -> list[float | None]:
        if self.column not in columns:
            raise ValueError(f"code_reward needs the column {self.column!r} with the tests of each row.")
        tests = [self.tests_of(value, row) for row, value in enumerate(columns[self.column])]
        programs = map(program_in, texts_of(completions))
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(self.reward, programs, tests))

    def check(self) -> None:
        self.sandbox.check()

    def tests_of(self, value: Any, row: int) -> list[Test]:
        """The tests of a row, which may be written as JSON. Raises ValueError for anything that is no list of tests."""
        found = value
        if isinstance(value, str):
            try:
                found = json.loads(value)
            except ValueError:
                found = [value]
        tests = [] if found is None else found
        if not isinstance(tests, (list, tuple)) or not all(map(_is_test, tests)):
            raise ValueError(
                f"{self.column} of row {row} is {str(value)[:100]!r}; it must be a list of asserts, or a list of "
                '{"input": ..., "output": ...}, or such a list as JSON.'
            )
        return list(tests)

    def reward(self, program: str, tests: Sequence[Test]) -> float | None:
        """The share of the tests that the program passes; None where there is none."""
        if not tests:
            return None
        asserts = [test for test in tests if isinstance(test, str)]
        passed = self.asserts_passed(program, asserts) if asserts else 0
        for test in (test for test in tests if not isinstance(test, str)):
            if not self.partial_credit and passed < len(asserts):
                return 0.0
            if self.prints(program, test):
                passed += 1
            elif not self.partial_credit:
                return 0.0
        return passed / len(tests) if self.partial_credit else float(passed == len(tests))

    def asserts_passed(self, program: str, asserts: Sequence[str]) -> int:
        word = secrets.token_hex(16)
        outcome = self.sandbox.run(HARNESS, repr([program, asserts, word]))
        lines = set(outcome.stdout.splitlines())
        return sum(f"{word} {number}" in lines for number in range(len(asserts)))

    def prints(self, program: str, test: Mapping[str, str]) -> bool:
        outcome = self.sandbox.run(program, test["input"])
        return outcome.ok and _lines(outcome.stdout) == _lines(test["output"])


def code_reward(
    column: str = "tests",
    partial_credit: bool = False,
    seconds: float = 5.0,
    memory: int = 512,
    backend: Literal["bwrap", "subprocess"] = "bwrap",
    allow_unsafe: bool = False,
    workers: int | None = None,
) -> _CodeReward:
    """A reward that is 1.0 for Python programs that pass all tests of their row, else 0.0; with `partial_credit`, the
    share that they pass. None for rows without tests.

    A program is the last fenced block of a completion, or all of it. `column` holds a row's tests: asserts, all run
    behind the program in one process, or {"input": ..., "output": ...} for what it reads and prints, a process each.
    `seconds` and `memory` (MiB) bound a process, `workers` is how many run at a time (one a core, at most 8).
    Programs have the standard library. Raises ValueError where the sandbox can't be: see `Sandbox`.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} runs no program; it must be at least 1.")
    sandbox = Sandbox(Limits(seconds=seconds, memory=memory), backend, allow_unsafe)
    return _CodeReward(column, partial_credit, sandbox, workers or min(os.cpu_count() or 1, 8))


def _is_test(test: Any) -> bool:
    if isinstance(test, Mapping):
        return all(isinstance(test.get(name), str) for name in ("input", "output"))
    return isinstance(test, str)


def _lines(text: str) -> list[str]:
    """The lines without white space at their ends, nor empty ones at the end: what graders of contests compare."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
