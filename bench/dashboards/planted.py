"""`spec-worker` with faults that can be switched on while it runs, to see the alerts fire.

    SLIPSTREAM_PLANT=FILE python -m bench.dashboards.planted run --config configs/worker.toml

The file names the fault: `slow` (every draft takes 150 ms longer), `wrong` (the drafter proposes whole drafts of
nonsense), `lie` (statistics tell half of the tokens handed out); empty or missing: none. The worker is the real one.
"""

import os
import sys
import time
from pathlib import Path

import torch

from worker import cli
from worker.batch import DecodeBatch
from worker.engine_thread import EngineThread
from worker.protocol import SpecStats
from worker.spec.draft import DraftOutput
from worker.spec.ngram import NgramDrafter

SLOW_SECONDS = 0.15
LOOK_SECONDS = 0.2


class Plant:
    """The fault of the moment, as the file names it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked = 0.0
        self._fault = ""

    def fault(self) -> str:
        """Return it; the file is read a few times per second at most."""
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            self._fault = self._path.read_text().strip() if self._path.exists() else ""
        return self._fault


def plant(path: Path) -> None:
    """Put the faults into the n-gram drafter and into what the statistics tell."""
    genuine, told, planted = NgramDrafter.draft, EngineThread.stats, Plant(path)

    def draft(self: NgramDrafter, batch: DecodeBatch) -> DraftOutput:
        output = genuine(self, batch)
        fault = planted.fault()
        if fault == "slow":
            time.sleep(SLOW_SECONDS)
        elif fault == "wrong":
            nonsense = torch.full_like(output.draft_tokens, 5)
            return output._replace(draft_tokens=nonsense, num_proposed=list(batch.row_budgets))
        return output

    def stats(self: EngineThread) -> SpecStats:
        found = told(self)
        if planted.fault() != "lie":
            return found
        halved = [
            item.model_copy(update={"emitted_tokens": item.emitted_tokens // 2}) for item in found.buckets
        ]
        return found.model_copy(update={"buckets": halved})

    NgramDrafter.draft = draft  # type: ignore[method-assign]
    EngineThread.stats = stats  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(Path(os.environ["SLIPSTREAM_PLANT"]))
    sys.exit(cli.main())
