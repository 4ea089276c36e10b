"""Counting rounds: what is reached, what is censored, and what time sums leave out."""

import threading

import pytest

from worker.spec.stats import RoundTimes, RowOutcome, StatsRecorder

TIMES = RoundTimes(draft_seconds=1.0, verify_seconds=2.0, round_seconds=4.0, catch_up_seconds=0.5)


def row(*, proposed, correct, budget, emitted=None, accept=None):
    accept = correct + 1 if accept is None else accept
    return RowOutcome(proposed, correct, accept, accept if emitted is None else emitted, budget, 10)


@pytest.mark.parametrize(
    ("outcome", "reached"),
    [
        (row(proposed=3, correct=0, budget=3), 1),  # failed at the first position
        (row(proposed=3, correct=2, budget=3), 3),  # failed at the third
        (row(proposed=3, correct=3, budget=3), 3),  # all correct: says nothing about a fourth
        (row(proposed=0, correct=0, budget=3), 1),  # nothing to propose is a failure at the first position
        (row(proposed=1, correct=1, budget=3), 2),  # … or at the second
        (row(proposed=1, correct=1, budget=1), 1),  # cut by the budget: censored
        (row(proposed=0, correct=0, budget=0), 0),
        (
            row(proposed=3, correct=2, budget=3, accept=4, emitted=2),
            2,
        ),  # EOS as second of three correct drafts
    ],
)
def test_reached(outcome, reached):
    assert outcome.num_reached == reached


def test_buckets_hold_what_was_executed():
    recorder = StatsRecorder()
    rows = [
        row(proposed=3, correct=2, budget=3),
        row(proposed=1, correct=1, budget=1),
        row(proposed=0, correct=0, budget=3),
    ]
    recorder.record_round(num_steps=3, rows=rows, verify_rows=7, times=TIMES, is_timed=True)
    recorder.record_round(num_steps=3, rows=rows, verify_rows=7, times=TIMES, is_timed=False)
    plain_row = row(proposed=0, correct=0, budget=0)
    recorder.record_round(num_steps=0, rows=[plain_row], verify_rows=1, times=TIMES, is_timed=True)
    plain, spec = recorder.snapshot().buckets
    assert (plain.num_steps, plain.max_batch_size, plain.proposed) == (0, 1, [])
    assert (spec.num_steps, spec.max_batch_size) == (3, 4)
    assert (spec.rounds, spec.request_rounds, spec.prefill_rounds, spec.timed_rounds) == (2, 6, 1, 1)
    assert (spec.proposed, spec.reached, spec.correct) == ([4, 2, 2], [6, 2, 2], [4, 2, 0])
    assert (spec.correct_squared, spec.accept_tokens, spec.emitted_tokens) == (10, 12, 12)
    assert (spec.round_seconds, spec.round_seconds_squared, spec.verify_rows) == (4.0, 16.0, 14)


def test_totals_and_finish_reasons():
    recorder = StatsRecorder()
    recorder.record_first_token(prompt_tokens=9)
    recorder.record_finish("stop")
    recorder.record_finish("stop")
    recorder.record_draft_failure()
    recorder.record_round(
        num_steps=1,
        rows=[row(proposed=1, correct=1, budget=1)],
        verify_rows=2,
        times=TIMES,
        is_timed=True,
    )
    snapshot = recorder.snapshot()
    assert (snapshot.prompt_tokens, snapshot.first_tokens, snapshot.generated_tokens) == (9, 1, 3)
    assert (snapshot.requests_finished, snapshot.draft_failures) == ({"stop": 2}, 1)


def test_no_reader_sees_half_a_round():
    recorder = StatsRecorder()
    stop = threading.Event()
    torn: list[object] = []

    def read():
        while not stop.is_set():
            for bucket in recorder.snapshot().buckets:
                if bucket.request_rounds != 8 * bucket.rounds or bucket.correct[0] > bucket.reached[0]:
                    torn.append(bucket)

    reader = threading.Thread(target=read)
    reader.start()
    rows = [row(proposed=1, correct=1, budget=1)] * 8
    for _ in range(300):
        recorder.record_round(num_steps=1, rows=rows, verify_rows=16, times=TIMES, is_timed=True)
    stop.set()
    reader.join()
    assert not torn
