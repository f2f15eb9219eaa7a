"""Programs that nobody has read, run in a process of their own with little time, memory and room, and no network.

Two backends. "bwrap" (bubblewrap, Linux) is a boundary: the program sees the system's libraries and a folder in memory,
nothing else: no network, no files, no other processes. "subprocess" bounds what a program uses by accident and is no
security boundary: it reads and writes what the user may, and reaches the network. It has to be asked for.
"""

import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

NOBODY = 65534
PROGRAM = """\
import resource, sys
limits = eval(sys.argv[1])
for name, value in limits.items():
    resource.setrlimit(getattr(resource, name), (value, value))
path = sys.argv[2]
sys.argv = [path]
with open(path, encoding="utf-8") as file:
    source = file.read()
del resource, name, value, limits, file
exec(compile(source, path, "exec"))
"""
"""Binds itself by limits that it can't raise again, and then becomes the program: no second start of Python, and no
imports that double the first."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 5.0
    """Time by the clock."""
    memory: int = 512
    """MiB of address space, each process."""
    processes: int = 8
    """Processes and threads at a time."""
    file_size: int = 1
    """MiB of a file, and of each output."""
    disk: int = 16
    """MiB of all files in each of the two folders that can be written to, which are in memory; bwrap only."""
    files: int = 64
    """Open files, each process."""

    def __post_init__(self):
        wrong = [name for name, value in vars(self).items() if value <= 0]
        if wrong:
            raise ValueError(f"{wrong[0]}={vars(self)[wrong[0]]} leaves a program nothing; it must be above 0.")

    def resources(self, running: int = 0) -> dict[str, int]:
        """By their names in `resource`; `running` processes of the same user don't count."""
        found = {
            "RLIMIT_CPU": int(self.seconds) + 1,
            "RLIMIT_FSIZE": self.file_size << 20,
            "RLIMIT_NOFILE": self.files,
            "RLIMIT_CORE": 0,
        }
        if sys.platform != "linux":  # elsewhere these two are unknown, or can't be counted
            return found
        return found | {"RLIMIT_AS": self.memory << 20, "RLIMIT_NPROC": self.processes + running}


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    returncode: int | None
    """None if its time was over; below 0 if a signal ended it."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def timed_out(self) -> bool:
        return self.returncode is None


@dataclass(frozen=True)
class Sandbox:
    """Runs Python programs. Raises ValueError where the backend doesn't work, and for "subprocess" unless
    `allow_unsafe`."""

    limits: Limits = Limits()
    backend: Literal["bwrap", "subprocess"] = "bwrap"
    allow_unsafe: bool = False

    def __post_init__(self):
        if self.backend not in ("bwrap", "subprocess"):
            raise ValueError(f'backend={self.backend!r} is neither "bwrap" nor "subprocess".')
        if self.backend == "subprocess" and not self.allow_unsafe:
            raise ValueError(
                'backend="subprocess" is no security boundary: programs read and write what you may, and reach the '
                "network. Install bubblewrap for a boundary, or accept this with allow_unsafe=True, on a machine that "
                "holds nothing of value."
            )
        if self.backend == "bwrap" and self.allow_unsafe:
            raise ValueError('allow_unsafe=True has no effect with backend="bwrap"; leave it out.')

    def check(self) -> None:
        """Raises ValueError where programs can't be run."""
        interpreter(self)

    def run(self, program: str, stdin: str = "") -> Outcome:
        """Run `program` with `stdin` as its input, until it ends or its time is over."""
        return self._run(interpreter(self), program, stdin)

    def _run(self, python: str, program: str, stdin: str = "") -> Outcome:
        with ExitStack() as stack:
            inputs, out, err, source = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
            inputs.write(stdin.encode("utf-8", "replace"))
            inputs.seek(0)
            source.write(program.encode("utf-8", "replace"))
            source.seek(0)
            if self.backend == "bwrap":
                how = Start([*walls(python, self.limits, source.fileno()), *self._command(python, "/program.py")])
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
                stack.callback(end_all_at_home, folder)
                how = self._plain_start(python, source, folder)
            began = time.monotonic()
            returncode = how.run(self.limits.seconds, stdin=inputs, stdout=out, stderr=err, pass_fds=(source.fileno(),))
            seconds = time.monotonic() - began
            texts = [self._text(file) for file in (out, err)]
        return Outcome(returncode, *texts, seconds)

    def _command(self, python: str, path: str, running: int = 0) -> list[str]:
        return [python, "-I", "-S", "-c", PROGRAM, repr(self.limits.resources(running)), path]

    def _plain_start(self, python: str, source: IO[bytes], folder: str) -> "Start":
        path = Path(folder, "program.py")
        path.write_bytes(source.read())
        if user := unprivileged():
            os.chown(folder, user, user)
        command = self._command(python, str(path), tasks_of(user or os.getuid()))
        return Start(command, cwd=folder, env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"})

    def _text(self, file: IO[bytes]) -> str:
        file.seek(0)
        return file.read(self.limits.file_size << 20).decode("utf-8", "replace")


@dataclass(frozen=True)
class Start:
    """A command, and where it is started."""

    command: Sequence[str]
    cwd: str | None = None
    env: Mapping[str, str] | None = None

    def run(self, seconds: float, **streams: Any) -> int | None:
        """Its exit code; None if it had to be killed, with all processes of its group, after `seconds`."""
        user = unprivileged()
        as_user = {"user": user, "group": user, "extra_groups": []} if user else {}
        try:
            process = subprocess.Popen(
                self.command, cwd=self.cwd, env=self.env, start_new_session=True, **as_user, **streams
            )
        except OSError as error:
            raise ValueError(f"{self.command[0]} can't be started: {error}") from error
        try:
            return ended(process, seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(process: subprocess.Popen, seconds: float) -> int | None:
    """Its exit code as soon as it has one; None after `seconds`."""
    if hasattr(os, "pidfd_open"):  # wakes up at once, where `wait` with a limit looks every 50 ms
        watched = os.pidfd_open(process.pid)
        try:
            return process.wait() if select.select([watched], [], [], seconds)[0] else None
        finally:
            os.close(watched)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def end_all_at_home(folder: str) -> None:
    """Kill what was started with this HOME and left the group of its program."""
    home, proc = f"HOME={folder}".encode(), Path("/proc")
    for _ in range(10):
        found = []
        for process in proc.glob("[0-9]*"):
            with suppress(OSError):
                if home in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def walls(python: str, limits: Limits, source: int) -> list[str]:
    """The command of bubblewrap, up to the command in it: what is there, all of it read-only but two folders in memory.

    `source` is the file descriptor of the program.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ValueError(
            "running programs needs bubblewrap, which is not installed (Debian, Ubuntu: apt-get install bubblewrap). "
            'Without it there is backend="subprocess", which is no security boundary.'
        )
    words = [bwrap, "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
    words += ["--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", os.defpath]
    words += ["--setenv", "LANG", "C.UTF-8", "--ro-bind", "/usr", "/usr"]
    for path in ("/lib", "/lib64", "/bin"):
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    prefix = str(Path(python).resolve().parents[1])
    words += [] if prefix == "/usr" or prefix.startswith("/usr/") else ["--ro-bind", prefix, prefix]
    words += ["--dev", "/dev"]
    for path in ("/tmp", "/dev/shm"):
        words += ["--size", str(limits.disk << 20), "--tmpfs", path]
    words += ["--ro-bind-data", str(source), "/program.py", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*words, *(["--disable-userns"] if knows(bwrap, "--disable-userns") else []), "--chdir", "/tmp", "--"]


@functools.cache
def knows(bwrap: str, option: str) -> bool:
    """Whether this version of bubblewrap has the option."""
    return option in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout


@functools.cache
def interpreter(sandbox: Sandbox) -> str:
    """The Python that runs there: this one, or the system's where this one can't be seen from inside.

    Raises ValueError where neither runs.
    """
    own = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    candidates = [own, *(path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path))]
    complaints = []
    for python in dict.fromkeys(map(os.path.realpath, candidates)):
        try:
            found = replace(sandbox, limits=Limits(seconds=30))._run(python, "print('works')")
        except ValueError as error:
            complaints.append(str(error))
            continue
        if found.stdout == "works\n":
            return python
        complaints.append(f"{python}: {found.stderr.strip()[-200:] or 'no output'}")
    raise ValueError(
        f"no Python runs in the sandbox ({sandbox.backend}): {'; '.join(complaints)}. Containers often forbid user "
        "namespaces, which bubblewrap needs."
    )


def unprivileged() -> int | None:
    """The user that programs of root's run as, since no limit on processes holds for root; None for others."""
    return NOBODY if os.getuid() == 0 else None


def tasks_of(user: int) -> int:
    """How many processes and threads the user has, as the limit on them counts."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            count += len(os.listdir(folder / "task")) if folder.stat().st_uid == user else 0
    return count
