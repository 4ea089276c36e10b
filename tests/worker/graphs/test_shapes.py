"""Which shape a round gets."""

from worker.graphs.shapes import Shape, ShapeGrid
from worker.models.attention import Segment


def grid(max_batch_size: int = 6, max_tokens: int = 3000) -> ShapeGrid:
    return ShapeGrid(max_batch_size=max_batch_size, widths=[4, 1, 2, 4], max_tokens=max_tokens)


def test_every_pair_that_can_be_asked_for_and_no_other() -> None:
    shapes = grid().shapes()
    assert len(shapes) == len(set(shapes)) == 4 * 3 * 3
    assert {shape.bucket for shape in shapes} == {1, 2, 4, 6}
    assert {shape.width for shape in shapes} == {1, 2, 4}
    assert {shape.context for shape in shapes} == {512, 2048, 3000}
    assert shapes[0] == Shape(6, 4, 3000)  # the one that takes the most memory is captured first


def test_the_smallest_that_holds_the_rows() -> None:
    assert grid().fit([Segment(0, 10, 1)]) == Shape(1, 1, 512)
    assert grid().fit([Segment(0, 10, 1), Segment(4, 509, 3), Segment(2, 0, 2)]) == Shape(4, 4, 512)
    assert grid().fit([Segment(0, 511, 1)]) == Shape(1, 1, 512)
    assert grid().fit([Segment(0, 511, 2)]) == Shape(1, 2, 2048)
    assert grid().fit([Segment(i, 2999, 1) for i in range(5)]) == Shape(6, 1, 3000)


def test_what_fits_nowhere() -> None:
    class Branch(Segment):
        """Rows that are no chain."""

    assert grid().fit([Segment(i, 0, 1) for i in range(7)]) is None  # batch
    assert grid().fit([Segment(0, 0, 5)]) is None  # rows per request
    assert grid().fit([Segment(0, 2999, 2)]) is None  # context
    assert grid().fit([Branch(0, 0, 1)]) is None


def test_a_small_machine_has_few() -> None:
    assert [shape.context for shape in ShapeGrid(max_batch_size=1, widths=[1], max_tokens=256).shapes()] == [
        256
    ]
