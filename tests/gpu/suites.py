"""Run the generated tests of many installed packages on a GPU: a line for each with the variants, the tests and the worst error.

    for spec in specs/*.yaml; do specgen build "$spec"; done     # and install the wheels
    python tests/gpu/suites.py [RESULT.txt] [PACKAGE ...]        # default: every *_kernels package found

Each package's tests run in a process of their own, a few at once on every GPU, those of most variants first, with the binaries
alone (SPECGEN_NO_JIT=1). The worst error is in units of its tolerance (runtime/reference.py states the tolerances). Exit status
1 if a test failed.
"""

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

import torch

AT_ONCE = 5  # processes of a GPU: they wait for the host more than for it
_RECORD = "SPECGEN_SUITE_RECORD"


class Recorder:
    """A pytest plugin: counts outcomes and keeps the worst error of one package's tests."""

    def __init__(self, package: str):
        self.found = {"passed": 0, "skipped": 0, "failed": [], "worst": 0.0}
        checks = importlib.import_module(f"{package}.runtime.testing.checks")
        reference = importlib.import_module(f"{package}.runtime.reference")
        original = checks.assert_matches

        def recording(pool, *arguments):
            errors = original(pool, *arguments)
            bounds = reference.tolerance(pool.case.torch_dtype)
            worst = max(errors.tensor / bounds.tensor, errors.row / bounds.row, errors.lse)
            self.found["worst"] = max(self.found["worst"], worst)
            return errors

        checks.assert_matches = recording

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.found["failed"].append(report.nodeid)
        elif report.skipped or report.when == "call":
            self.found["skipped" if report.skipped else "passed"] += 1


def run_one(package: str) -> int:
    """In a process of its own: the package's tests, the record written where the environment says."""
    import pytest

    recorder = Recorder(package)
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "--pyargs", package], [recorder])
    Path(os.environ[_RECORD]).write_text(json.dumps(recorder.found))
    return int(status)


def suite(package: str, gpus: SimpleQueue) -> tuple[str, dict, str]:
    """(package, record, output) of one package's tests, on the next of some GPUs."""
    gpu = gpus.get()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        ours = {_RECORD: str(record), "SPECGEN_NO_JIT": "1", "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "2"}
        command = [sys.executable, __file__, "--one", package]
        done = subprocess.run(command, env={**os.environ, **ours}, cwd=folder, capture_output=True, text=True)
        gpus.put(gpu)
        found = json.loads(record.read_text()) if record.is_file() else {"failed": ["did not run"]}
        return package, found, done.stdout + done.stderr


def variants(package: str) -> int:
    """Kernels of an installed package."""
    manifest = Path(importlib.util.find_spec(package).origin).with_name("manifest.json")
    return len(json.loads(manifest.read_text())["variants"])


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--one"]:
        return run_one(arguments[1])
    result = Path(arguments.pop(0)) if arguments and arguments[0].endswith(".txt") else None
    packages = arguments or sorted(m.name for m in pkgutil.iter_modules() if m.name.endswith("_kernels"))
    packages.sort(key=variants, reverse=True)
    gpus = SimpleQueue()
    for _ in range(AT_ONCE):
        for gpu in range(torch.cuda.device_count()):
            gpus.put(gpu)
    lines, failures = [f"{'package':32s} {'variants':>8s} {'passed':>6s} {'skipped':>7s} {'failed':>6s}  worst error / tolerance"], []
    with ThreadPoolExecutor(gpus.qsize()) as pool:
        for done in as_completed([pool.submit(suite, package, gpus) for package in packages]):
            package, found, output = done.result()
            counts = [variants(package), found.get("passed", 0), found.get("skipped", 0), len(found["failed"])]
            lines.append("{:32s} {:8d} {:6d} {:7d} {:6d}  {:.3f}".format(package, *counts, found.get("worst", 0.0)))
            print(lines[-1], flush=True)
            if result:
                result.write_text("\n".join(lines) + "\n")
            if found["failed"]:
                failures.append(f"{package}: {', '.join(found['failed'][:5])}\n{output[-3000:]}")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
