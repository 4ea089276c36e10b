"""A GGUF file's metadata and tensors, with errors that name the file and the field.

Knows the container and its types; knows nothing about what an architecture or a tokenizer makes of them.
"""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from worker.models.config import ModelError

MAGIC = b"GGUF"
BROKEN = (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError, struct.error)
"""What the reader raises on a damaged or cut file."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins like a GGUF."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class GgufFile:
    """One open file. Values are checked when they are asked for; a missing one without a default is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_gguf(path):
            raise ModelError(f"{path}: not a GGUF file (it does not begin with {MAGIC.decode()})")
        try:
            reader = gguf.GGUFReader(path)
            self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        except BROKEN as error:
            raise ModelError(f"{path}: damaged or cut off: {error}") from error
        self._fields = reader.fields
        self.architecture = self.text("general.architecture")
        if self.integer("split.count", 1) > 1:
            raise ModelError(f"{path}: split.count is {self.integer('split.count')}; merge the parts first")

    def names(self, prefix: str) -> list[str]:
        """Return the metadata keys with a prefix."""
        return [name for name in self._fields if name.startswith(prefix)]

    def has(self, name: str) -> bool:
        """Whether the metadata has a key."""
        return name in self._fields

    def own(self, name: str) -> str:
        """Return the full key of one of the architecture's own fields: `llama.` + name."""
        return f"{self.architecture}.{name}"

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        return str(self._checked(name, str, default))

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 0."""
        value = self._checked(name, int, default)
        if isinstance(value, bool) or value < 0:
            raise ModelError(f"{self.path}: {name} must be an integer of at least 0, got {value!r}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Stored as float32: 1e-05 would come out as 9.999999747378752e-06."""
        value = self._checked(name, (int, float), default)
        if isinstance(value, bool) or not 0 < value < np.inf:
            raise ModelError(f"{self.path}: {name} must be a positive number, got {value!r}")
        return float(f"{value:.6g}") if isinstance(value, float) else float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        return bool(self._checked(name, bool, default))

    def array(self, name: str, kind: type | tuple[type, ...]) -> list[Any]:
        """Return an array of `kind`."""
        values = self._checked(name, list, None)
        if not all(isinstance(value, kind) for value in values):
            raise ModelError(f"{self.path}: {name} must be an array of one type, {kind}")
        return list(values)

    def _checked(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        field = self._fields.get(name)
        if field is None and default is None:
            raise ModelError(f"{self.path}: {name} is missing")
        try:
            value = default if field is None else field.contents()
        except BROKEN as error:
            raise ModelError(f"{self.path}: {name} cannot be read: {error}") from error
        if not isinstance(value, kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise ModelError(
                f"{self.path}: {name} must be of type {' or '.join(k.__name__ for k in kinds)}, "
                f"got {str(value)[:60]}"
            )
        return value

    def weight(self, name: str) -> np.ndarray:
        """Return a tensor dequantised to float32, rows first.

        Raises:
            ModelError: its quantisation is unknown, or its data are cut off.
        """
        tensor = self.tensors[name]
        try:
            weight: np.ndarray = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {name} is of type {tensor.tensor_type.name}, which cannot be dequantised"
            ) from None
        except BROKEN as error:
            raise ModelError(f"{self.path}: tensor {name} cannot be read: {error}") from error
        return weight.astype(np.float32, copy=False)
