"""What programs in a sandbox can't do, and that they are ended in time."""

import os
import shutil
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from strop.rewards import sandbox as sandboxes
from strop.rewards.sandbox import Limits, Sandbox

LIMITS = Limits(seconds=20.0)
WALLS = pytest.param(
    Sandbox(LIMITS),
    marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
    id="bwrap",
)
PLAIN = pytest.param(Sandbox(LIMITS, "subprocess", allow_unsafe=True), id="subprocess")
everywhere = pytest.mark.parametrize("sandbox", [WALLS, PLAIN])
behind_walls = pytest.mark.parametrize("sandbox", [WALLS])


def impatient(sandbox):
    return replace(sandbox, limits=Limits(seconds=0.5))


@everywhere
def test_a_program_reads_and_prints(sandbox):
    found = sandbox.run("import sys; print(input()[::-1]); sys.stderr.write('é')", "abc\n")
    assert (found.stdout, found.stderr, found.returncode, found.ok) == ("cba\n", "é", 0, True)


@everywhere
def test_failures_show_where(sandbox):
    found = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert found.returncode == 1
    assert "line 2, in f" in found.stderr
    assert "ZeroDivisionError" in found.stderr
    assert sandbox.run("raise SystemExit(3)").returncode == 3


@everywhere
@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_time_is_over_for_what_does_not_end(sandbox, program):
    found = impatient(sandbox).run(program)
    assert found.timed_out
    assert not found.ok


@everywhere
def test_a_fork_bomb_goes_no_further_than_its_limit_and_ends(sandbox):
    counted = """
        import os, time
        children = 0
        try:
            while children < 100:
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                children += 1
        except OSError:
            print(children)
    """
    # There the limit is what others that run as the same user had a moment ago, and as much again.
    most = LIMITS.processes if sandbox.backend == "bwrap" else 50
    assert 0 < int(sandbox.run(dedent(counted)).stdout) <= most
    assert (
        impatient(sandbox)
        .run("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass")
        .timed_out
    )


@pytest.mark.skipif(sys.platform != "linux", reason="daemons are found in /proc")
def test_a_daemon_of_a_plain_process_ends_with_its_program():
    """bubblewrap ends what it began with."""
    daemon = """
        import os, time
        heard, told = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(told, str(os.getpid()).encode())
                time.sleep(60)
            os._exit(0)
        print(os.read(heard, 20).decode())
    """
    (sandbox,) = PLAIN.values
    daemon_id = sandbox.run(dedent(daemon)).stdout.strip()
    state = Path("/proc", daemon_id, "stat")
    assert daemon_id.isdigit()
    for _ in range(100):
        with suppress(OSError):
            if state.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return
    raise AssertionError("it goes on")


@everywhere
def test_memory_is_bounded(sandbox):
    assert "MemoryError" in sandbox.run("hog = bytearray(1 << 30)").stderr


@everywhere
def test_files_and_outputs_are_bounded(sandbox):
    assert "File too large" in sandbox.run("open('a', 'wb').write(bytes(2 << 20))").stderr
    spam = sandbox.run("while True:\n    print('x' * 1000)")
    assert not spam.ok
    assert len(spam.stdout) <= LIMITS.file_size << 20


@everywhere
def test_limits_cannot_be_raised_again(sandbox):
    program = "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (100, 100))"
    assert "not allowed to raise maximum limit" in sandbox.run(program).stderr


@behind_walls
def test_nothing_but_the_system_and_two_folders_is_there(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    program = """
        import os
        print(sorted(os.listdir("/")))
        places = ("/", "/usr", "/etc", "/dev", "/program.py", "/dev/shm", ".")
        print([place for place in places if os.access(place, os.W_OK)])
        print("SECRET" in os.environ, os.getuid(), os.path.exists("/etc/passwd"), os.path.exists("/proc/1"))
    """
    first, second, third = sandbox.run(dedent(program)).stdout.splitlines()
    assert set(eval(first)) <= {"bin", "dev", "etc", "lib", "lib64", "program.py", "tmp", "usr"}
    assert eval(second) == ["/dev/shm", "."]
    assert third == f"False {sandboxes.NOBODY} False False"


@behind_walls
def test_folders_in_memory_are_bounded(sandbox):
    program = """
        written = 0
        try:
            for number in range(100):
                with open(f"{folder}/{number}", "wb") as file:
                    file.write(bytes(1 << 20))
                written += 1
        except OSError:
            print(written)
    """
    for folder in (".", "/dev/shm"):
        found = sandbox.run(f"folder = {folder!r}\n{dedent(program)}")
        assert 0 < int(found.stdout) <= LIMITS.disk


@behind_walls
def test_there_is_no_network_not_even_to_this_machine(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
        assert "ConnectionRefusedError" in sandbox.run(program).stderr
    outside = "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)"
    assert "Network is unreachable" in sandbox.run(outside).stderr


@behind_walls
def test_other_processes_are_out_of_reach(sandbox):
    assert "No such process" in sandbox.run(f"import os, signal\nos.kill({os.getpid()}, signal.SIGKILL)").stderr
    assert (
        "PermissionError"
        in sandbox.run("import ctypes, os\nif ctypes.CDLL(None).unshare(0x10000000): raise PermissionError").stderr
    )


@everywhere
def test_from_several_threads(sandbox):
    found = [""] * 4
    threads = [
        threading.Thread(target=lambda i=i: found.__setitem__(i, sandbox.run(f"print({i})").stdout)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["0\n", "1\n", "2\n", "3\n"]


def test_what_is_no_boundary_has_to_be_asked_for():
    with pytest.raises(ValueError, match="no security boundary"):
        Sandbox(backend="subprocess")
    with pytest.raises(ValueError, match="no effect"):
        Sandbox(allow_unsafe=True)
    with pytest.raises(ValueError, match="docker"):
        Sandbox(backend="docker")
    with pytest.raises(ValueError, match=r"seconds=0 leaves a program nothing"):
        Limits(seconds=0)


def test_without_bubblewrap_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="apt-get install bubblewrap"):
        Sandbox(Limits(seconds=3.5)).check()
