"""`spec-worker` with faults that can be switched on while it runs, to see the alerts fire.

    SLIPSTREAM_PLANT=FILE python -m bench.dashboards.planted run --config configs/worker.toml

The file names the fault: `slow` (every draft takes 150 ms longer), `creep` (longer with every round), `wrong` (the
drafter proposes whole drafts of nonsense); empty or missing: none. The worker itself is the real one.
"""

import os
import sys
import time
from pathlib import Path

import torch

from worker import cli
from worker.batch import DecodeBatch
from worker.spec.draft import DraftOutput
from worker.spec.ngram import NgramDrafter

SLOW_SECONDS = 0.15
CREEP_SECONDS = 0.002
LOOK_SECONDS = 0.2


class Plant:
    """The fault of the moment, as the file names it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked = 0.0
        self._fault = ""
        self.rounds = 0
        """Rounds since the fault was switched on."""

    def fault(self) -> str:
        """Return it; the file is read a few times per second at most."""
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            found = self._path.read_text().strip() if self._path.exists() else ""
            if found != self._fault:
                self._fault, self.rounds = found, 0
        return self._fault


def plant(path: Path) -> None:
    """Put the faults into the n-gram drafter."""
    genuine, planted = NgramDrafter.draft, Plant(path)

    def draft(self: NgramDrafter, batch: DecodeBatch) -> DraftOutput:
        output = genuine(self, batch)
        fault = planted.fault()
        planted.rounds += 1
        if fault == "slow":
            time.sleep(SLOW_SECONDS)
        elif fault == "creep":
            time.sleep(CREEP_SECONDS * planted.rounds)
        elif fault == "wrong":
            nonsense = torch.full_like(output.draft_tokens, 5)
            return output._replace(draft_tokens=nonsense, num_proposed=list(batch.row_budgets))
        return output

    NgramDrafter.draft = draft  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(Path(os.environ["SLIPSTREAM_PLANT"]))
    sys.exit(cli.main())
