"""A process that answers questions: it may hang, die, print, and outlive nobody."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specgen.child import Child, Died, TimedOut, serve


def answer(question):
    """What the children of these tests do."""
    kind, value = question
    if kind == "echo":
        print("a library prints")
        return value
    if kind == "exit":
        print("the last line", file=sys.stderr, flush=True)
        os._exit(value)
    if kind == "kill":
        os.kill(os.getpid(), value)
    if kind == "sleep":
        time.sleep(value)
    if kind == "seen":
        return os.environ.get(value), os.getcwd()
    raise ValueError(kind)


def main(folder):
    """Entry of the children."""
    serve(Path(folder), answer)


@pytest.fixture
def child(tmp_path):
    child = Child("test_child:main", tmp_path / "child", {**os.environ, "MARK": "7"})
    yield child
    child.kill()
    child.close()


def test_it_answers_and_leaves_nothing(child, tmp_path):
    assert [child.ask(("echo", n), 60) for n in range(3)] == [0, 1, 2]
    assert child.ask(("seen", "MARK"), 60) == ("7", str(tmp_path / "child"))
    assert child.alive
    child.close()
    assert not child.alive and not (tmp_path / "child").exists()


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (("exit", 3), "ended with status 3: the last line"),
        (("kill", signal.SIGKILL), "was killed by SIGKILL"),
        (("kill", signal.SIGSEGV), "was killed by SIGSEGV"),
        (("unknown", 0), "ended with status 1: ValueError: unknown"),
    ],
)
def test_its_death_is_told(child, question, words):
    with pytest.raises(Died, match=words):
        child.ask(question, 60)
    assert not child.alive


def test_it_is_killed_when_it_takes_too_long(child):
    child.ask(("echo", 0), 60)
    started = time.monotonic()
    with pytest.raises(TimedOut, match="0.5 s"):
        child.ask(("sleep", 60), 0.5)
    assert time.monotonic() - started < 20 and not child.alive
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_an_orphan_ends_in_the_middle_of_an_answer(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from specgen.child import Child\n"
        f"child = Child('test_child:main', Path({str(tmp_path / 'child')!r}), os.environ)\n"
        "child.ask(('echo', 0), 60); print(child.pid, flush=True); child.ask(('sleep', 3600), 3600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while (tmp_path / "child").exists():
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.05)
