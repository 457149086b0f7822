"""A process of its own that answers questions one at a time: what may hang or die does so there, not here.

The parent writes pickled questions to the child's standard input and reads pickled answers from its standard output.
Whatever the child prints goes to `log` in the folder it is given, which is its own and goes when it ends. Knows nothing of
what is asked: `aot` compiles in such processes, `tuning` measures in them.
"""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_WATCH = 1.0  # seconds between two looks of a child at whether its parent still lives
_PATIENCE = 5.0  # seconds for a process that has closed its output to end
_LAST_WORDS = 200  # characters of the log's last line that an error shows


class Died(Exception):
    """The process ended without an answer; the text says how: "was killed by SIGSEGV: last line of its log"."""


class TimedOut(Exception):
    """No answer came within the limit; the process has been killed."""


class Child:
    """One such process, started at once.

    `entry` names the function that it runs, "package.module:function", called with the folder; it answers by `serve`.
    `folder` (made anew) is its working directory; `environment` is all that it inherits.
    """

    def __init__(self, entry: str, folder: Path, environment: Mapping[str, str]):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._log = folder / "log"
        self._ended = False
        module, function = entry.split(":")
        paths = [os.path.abspath(path) for path in sys.path]
        program = f"import sys; sys.path[:] = {paths!r}; from {module} import {function}; {function}(sys.argv[1])"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(folder)],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # killing it takes along what it started; a Ctrl-C reaches the parent alone
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        self._ended = self._ended or self._process.poll() is not None
        return not self._ended

    def ask(self, question: object, time_limit: float) -> object:
        """The answer. Raises TimedOut after `time_limit` seconds, Died if the process ends first; then it is gone."""
        started = time.monotonic()
        timer = threading.Timer(time_limit, self.kill)
        timer.start()
        try:
            pickle.dump(question, self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # its own end tells more than our signal
                self._process.wait(_PATIENCE)
            self.kill()
            code = self._process.wait()
            self._ended = True
            if time.monotonic() - started >= time_limit:
                raise TimedOut(f"{time_limit:g} s") from None
            raise Died(f"{_ending(code)}{self._last_words()}") from None
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Ends the process and what it started, at once."""
        if self._ended:  # the number may be another process's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets the process end by itself, as its input does."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._ended = True
        self._process.stdout.close()

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f": {lines[-1].strip()[:_LAST_WORDS]}" if lines else ""


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def serve(folder: Path, answer: Callable[[object], object]) -> None:
    """Answers questions until standard input ends, then removes the folder. Runs in the child.

    The log is emptied before each question. Where the parent is gone the process ends too, in the middle of an answer.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print
    threading.Thread(target=_watch, args=(folder, os.getppid()), daemon=True).start()
    try:
        while True:
            question = pickle.load(sys.stdin.buffer)
            os.ftruncate(2, 0)
            pickle.dump(answer(question), answers)
            answers.flush()
    except (EOFError, BrokenPipeError):
        _remove(folder)


def _watch(folder: Path, parent: int) -> None:
    """Ends an orphan: an answer that hangs would hold a GPU for ever."""
    while os.getppid() == parent:
        time.sleep(_WATCH)
    _remove(folder)
    os._exit(1)


def _remove(folder: Path) -> None:
    os.chdir("/")
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
