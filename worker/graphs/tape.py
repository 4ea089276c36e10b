"""A stand-in for CUDA graphs on a CPU: records operations and their tensors, and repeats just those.

It has the traps of the real thing: what Python computed during the capture is fixed, every result is written where the
first one was, and an operation whose outcome the host would have to wait for is refused. For tests and rehearsals; it
saves no time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker.graphs.capture import Run

_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")


class CaptureRefused(RuntimeError):
    """An operation that cannot be captured."""


def makes_host_wait(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation's result has to be known to the host before it can go on (as on a GPU)."""
    name = func.overloadpacket.__name__
    if name in _WAITS:
        return True
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class TapeCapture:
    """Captures on a CPU."""

    def __call__(self, run: Run) -> Run:
        """See `Capture`."""
        tape = _Tape()
        with tape:
            outputs = run()

        def replay() -> Sequence[Tensor]:
            tape.replay()
            return outputs

        return replay


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What was done, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if makes_host_wait(func, args):
            raise CaptureRefused(f"{func} makes the host wait: it cannot be captured")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        # A view, or a tensor changed in place, is where it was already.
        fresh = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _memory(leaf) not in read
        ]
        self._steps.append((func, args, kwargs, fresh))
        return result

    def replay(self) -> None:
        """Repeat it."""
        for func, args, kwargs, written in self._steps:
            result = func(*args, **kwargs)
            again = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if written:
                for old, new in zip(written, again, strict=True):
                    old.copy_(new)


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
