"""Set up a pinned environment in .venv and build or test with it. Needs Python >= 3.11 and, for the launch extension, a C compiler.

    python3 dev.py build [SPEC ...]       build kernel wheels (default: specs/llama_3_1_8b.yaml)
    python3 dev.py test [PYTEST ARGS]     run the tests; no GPU needed

The environment is set up at the first call and again when requirements.txt or pyproject.toml changes.
"""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run(*command: str | Path) -> None:
    """Run a command in the checkout; end with its status if it fails."""
    status = subprocess.run([str(part) for part in command], cwd=ROOT).returncode
    if status:
        sys.exit(status)


def set_up() -> None:
    """Create or renew .venv when what it is made from has changed."""
    inputs = [ROOT / "requirements.txt", ROOT / "pyproject.toml"]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in inputs) + sys.version.encode()).hexdigest()
    stamp = VENV / "specgen-state"
    if stamp.is_file() and stamp.read_text() == state:
        return
    venv.create(VENV, clear=True, with_pip=True)
    run(PYTHON, "-m", "pip", "install", "-q", "-r", "requirements.txt")
    run(PYTHON, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", ".")
    stamp.write_text(state)


def main() -> None:
    """Entry point: see the module's docstring."""
    if sys.version_info < (3, 11):
        sys.exit(f"dev.py needs Python >= 3.11, this is {sys.version.split()[0]}")
    command, *arguments = sys.argv[1:] or [""]
    if command not in ("build", "test"):
        sys.exit(__doc__)
    set_up()
    if command == "build":
        for spec in arguments or ["specs/llama_3_1_8b.yaml"]:
            run(PYTHON, "-m", "specgen", "build", spec)
    else:
        run(PYTHON, "-m", "pytest", "-n", os.environ.get("SPECGEN_TEST_WORKERS", "auto"), *arguments)


if __name__ == "__main__":
    main()
