"""Which code decides: the package's version and a digest of the core's sources.

Replay promises the same decisions for the same code; the digest says whether it is the same.
"""

import hashlib
import importlib.metadata
from pathlib import Path

CORE = ("types.py", "turn.py", "life.py", "observe.py", "guards.py", "estimate*", "policies")


def package_version() -> str:
    """Return the package's version."""
    return importlib.metadata.version("slipstream")


def code_version() -> str:
    """Return `version+digest`; equal digests decide equally."""
    root = Path(__file__).parent
    files = {
        file
        for pattern in CORE
        for found in root.glob(pattern)
        for file in ([found] if found.is_file() else found.rglob("*.py"))
    }
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return f"{package_version()}+{digest.hexdigest()[:10]}"
