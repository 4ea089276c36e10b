"""The graphs of an engine: which forwards its target and its drafter run in rounds, and in which shapes.

Only what the configuration can reach is captured: batches up to `max_batch_size`, the widths that its tiers verify, and
of a drafter only what its deepest tier runs. Knows no forward from inside.
"""

from collections.abc import Sequence

from torch import Tensor

from worker.graphs.capture import Capture
from worker.graphs.forward import Forward, GraphedForward
from worker.graphs.shapes import ShapeGrid
from worker.model_runner import ModelRunner
from worker.spec.composite import model_part
from worker.spec.draft import Drafter
from worker.spec.eagle import EagleDrafter
from worker.spec.model_draft import ModelDrafter


def capture_graphs(
    runner: ModelRunner,
    drafter: Drafter | None,
    capture: Capture,
    *,
    candidate_steps: Sequence[int],
    max_batch_size: int,
) -> int:
    """Capture everything that rounds run, before anything is stored; return the number of graphs.

    Args:
        runner: the target.
        drafter: its partner.
        capture: how.
        candidate_steps: the tiers.
        max_batch_size: of the largest batch that is to have graphs.
    """
    part, deepest = model_part(drafter), candidate_steps[-1]
    runner.kv.add_padding_slot()
    verify_widths = [num_steps + 1 for num_steps in candidate_steps]
    is_chain = part is None or part.topk == 1
    # Trees are verified, and grown, without graphs: only rounds at depth 0 are rows in order there.
    runner.graphs = _of_decoder(runner, verify_widths if is_chain else [1], max_batch_size)
    found = [runner.graphs]
    if deepest and isinstance(part, ModelDrafter):
        part.runner.kv.add_padding_slot()
        # One token from the second step on; the first forward has two where the round before was accepted whole.
        part.runner.graphs = _of_decoder(part.runner, [1], max_batch_size)
        part.runner.last_row_graphs = _of_decoder(part.runner, [2], max_batch_size, last_only=True)
        found += [part.runner.graphs, part.runner.last_row_graphs]
    if deepest and isinstance(part, EagleDrafter):
        part.kv.add_padding_slot()
        # What a round committed may be more than the next one drafts, so every tier's width is extended by.
        part.extend_graphs = _of_head(part, part.extend_padded, verify_widths, max_batch_size)
        found.append(part.extend_graphs)
        if deepest > 1 and is_chain:
            part.step_graphs = _of_head(part, part.step_padded, [1], max_batch_size, hidden=part.no_hidden())
            found.append(part.step_graphs)
    return sum(graphs.capture(capture) for graphs in found)


def _of_decoder(
    runner: ModelRunner, widths: Sequence[int], max_batch_size: int, *, last_only: bool = False
) -> GraphedForward:
    return GraphedForward(
        lambda inputs: (runner.decode_padded(inputs, last_only=last_only),),
        ShapeGrid(max_batch_size=max_batch_size, widths=widths, max_tokens=runner.kv.max_tokens),
        padding_slot=runner.kv.padding_slot,
        device=runner.device,
    )


def _of_head(
    drafter: EagleDrafter,
    forward: Forward,
    widths: Sequence[int],
    max_batch_size: int,
    *,
    hidden: Tensor | None = None,
) -> GraphedForward:
    return GraphedForward(
        forward,
        ShapeGrid(max_batch_size=max_batch_size, widths=widths, max_tokens=drafter.kv.max_tokens),
        padding_slot=drafter.kv.padding_slot,
        device=drafter.device,
        hidden=hidden,
    )
