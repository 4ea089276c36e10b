"""Cumulative counters become windows; resets become baselines."""

import asyncio
from typing import Any

from controller.observe import Observer


def read(worker: Any) -> Any:
    return asyncio.run(worker.stats())


def test_first_reading_is_a_baseline(worker: Any) -> None:
    worker.rounds(50)
    observation = Observer().observe(read(worker), 1.0)
    assert observation.is_baseline and observation.cells == () and observation.span_seconds == 0


def test_only_the_difference_counts(worker: Any) -> None:
    worker.acceptance = [1.0] * 64
    worker.rounds(1000)
    observer = Observer()
    observer.observe(read(worker), 1.0)
    worker.acceptance = [0.0] * 64
    worker.rounds(10)
    observation = observer.observe(read(worker), 1.5)
    (cell,) = observation.cells
    assert (cell.rounds, cell.request_rounds, cell.num_steps) == (10, 10, 2)
    assert cell.reached == (10, 0) and cell.correct == (0, 0)
    assert observation.span_seconds == 0.5 and observation.generated_tokens == 10


def test_idle_has_no_cells(worker: Any) -> None:
    observer = Observer()
    worker.rounds(10)
    observer.observe(read(worker), 1.0)
    observation = observer.observe(read(worker), 2.0)
    assert observation.cells == () and not observation.is_baseline


def test_another_boot_starts_again(worker: Any) -> None:
    observer = Observer()
    worker.rounds(10)
    observer.observe(read(worker), 1.0)
    worker.restart("boot-2")
    worker.rounds(500)  # more than before: only the boot_id tells
    assert observer.observe(read(worker), 2.0).is_baseline
    worker.rounds(3)
    assert observer.observe(read(worker), 3.0).cells[0].rounds == 3


def test_a_counter_that_went_backwards_starts_again(worker: Any) -> None:
    observer = Observer()
    worker.rounds(100)
    observer.observe(read(worker), 1.0)
    worker.restart(worker.boot_id)  # same boot_id, counters from 0
    worker.rounds(10)
    observation = observer.observe(read(worker), 2.0)
    assert observation.is_baseline and observation.cells == () and observation.generated_tokens == 0


def test_a_single_counter_that_went_backwards_is_enough(worker: Any) -> None:
    observer = Observer()
    worker.acceptance = [1.0] * 64
    worker.rounds(100)
    before = read(worker)
    observer.observe(before, 1.0)
    worker.rounds(1)
    after = read(worker)
    bucket = after.buckets[0].model_copy(update={"correct": [101, 99]})
    assert observer.observe(after.model_copy(update={"buckets": [bucket]}), 2.0).is_baseline
    assert not observer.observe(after.model_copy(update={"buckets": [bucket]}), 3.0).is_baseline
    assert observer.observe(after.model_copy(update={"buckets": []}), 4.0).is_baseline, "a bucket vanished"


def test_buckets_are_kept_apart_by_what_was_executed(worker: Any) -> None:
    observer = Observer()
    observer.observe(read(worker), 1.0)
    worker.rounds(5)
    worker.batch_size = 3
    worker.rounds(7)
    cells = observer.observe(read(worker), 2.0).cells
    assert [(c.max_batch_size, c.rounds, c.request_rounds) for c in cells] == [(1, 5, 5), (4, 7, 21)]
