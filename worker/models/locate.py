"""A `path` setting → a Hugging Face directory: the default model, a GGUF file, or a directory as it is.

Knows where converted files are kept; knows nothing about what is in them.
"""

import functools
import hashlib
import os
from pathlib import Path

from worker.models.config import ModelError
from worker.models.fetch import ensure_default_model
from worker.models.store import Say, is_made, make_once, models_directory, say_on_stderr

DEFAULT = "default"
CONVERSION = 1
"""Raise it when the converter's output changes: directories of an earlier one are made anew."""
DIGEST_CHARACTERS = 16
"""Of the sha256 that a converted directory's name carries; its origin file holds all of it."""


def locate_model(path: str, *, say: Say = say_on_stderr) -> Path:
    """Return the directory that a `path` setting means, fetching or converting it where that was not done yet.

    Args:
        path: `default`, a GGUF file, or a Hugging Face directory.
        say: told of what takes long.

    Raises:
        ModelError: there is nothing at the path, or the file cannot be converted.
    """
    if path == DEFAULT:
        return ensure_default_model(say=say)
    found = Path(path)
    if found.is_dir():
        return found
    if found.is_file():
        return _ensure_converted(found, say)
    raise ModelError(f"{path}: no such file or directory; expected a Hugging Face directory or a GGUF file")


def model_name(path: str) -> str:
    """Return what a model is called unless the configuration names it: the directory's or file's own name."""
    if path == DEFAULT:
        return ensure_default_model().name
    found = Path(path).resolve()
    return found.name if found.is_dir() else found.stem


def _ensure_converted(source: Path, say: Say) -> Path:
    """Convert a GGUF file once: the directory's name comes from the content, wherever the file lies."""
    try:
        stat = source.stat()
        digest = _sha256(source.resolve(), stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ModelError(f"{source}: cannot be read: {error.strerror or error}") from error
    directory = models_directory() / f"gguf-{digest[:DIGEST_CHARACTERS]}"
    origin = {"gguf_sha256": digest, "conversion": CONVERSION}
    if not is_made(directory, origin):
        try:
            make_once(directory, origin, lambda result: _convert(source, result, say), say=say)
        except OSError as error:
            raise ModelError(f"{source}: cannot be converted into {directory}: {error}") from error
        say(f"converted: {directory}")
    return directory


def _convert(source: Path, result: Path, say: Say) -> None:
    from worker.models.convert import convert_gguf  # needs gguf and tokenizers: only the first run pays

    say(f"converting {source} to safetensors (once)")
    convert_gguf(source, result)


@functools.lru_cache(maxsize=8)
def _sha256(path: Path, size: int, changed_nanoseconds: int) -> str:
    """Return the digest of a file; size and time of change are there to notice another content."""
    with open(os.fspath(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
