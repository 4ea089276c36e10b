"""Model directories that are made once: where they are, and how one appears whole.

Knows nothing about what a directory holds or where its content comes from. A finished directory appears by one rename:
it is complete or not there. Several processes may ask at the same time; one works, the others wait.
"""

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODELS_DIR_VARIABLE = "SPEC_MODELS_DIR"
ORIGIN_FILE = "origin.json"
"""Written beside the weights: what the directory was made from, and by which version of the conversion."""

Say = Callable[[str], None]


def models_directory() -> Path:
    """Return `$SPEC_MODELS_DIR`; without the variable, `models/` of the checkout or the working directory."""
    chosen = os.environ.get(MODELS_DIR_VARIABLE)
    if chosen:
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[2]
    root = checkout if (checkout / "pyproject.toml").exists() else Path.cwd()
    return root / "models"


def say_on_stderr(line: str) -> None:
    """Write one line of progress to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def is_made(directory: Path, origin: dict[str, Any]) -> bool:
    """Whether the directory is there, whole, and made from `origin`."""
    try:
        return bool(json.loads((directory / ORIGIN_FILE).read_text(encoding="utf-8")) == origin)
    except (OSError, ValueError):
        return False


def make_once(directory: Path, origin: dict[str, Any], fill: Callable[[Path], None], *, say: Say) -> None:
    """Make a directory unless it is there; replace one of another origin.

    Args:
        directory: where it shall be.
        origin: compared with what an existing directory was made from.
        fill: writes the content into the empty directory that it is given; if it raises, nothing is left.
        say: told when another process is at it.
    """
    if is_made(directory, origin):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory, say):
        if is_made(directory, origin):  # another process may have finished it meanwhile
            return
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
            result = Path(scratch) / "model"
            result.mkdir()
            fill(result)
            (result / ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
            if directory.exists():  # an older conversion: out of the way, and gone with the scratch directory
                directory.rename(Path(scratch) / "old")
            result.rename(directory)


@contextmanager
def _locked(directory: Path, say: Say) -> Iterator[None]:
    """Hold an advisory lock between processes; it goes with the process, however that ends."""
    with (directory.parent / f".{directory.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is making {directory}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
