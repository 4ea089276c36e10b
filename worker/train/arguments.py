"""The arguments of `spec-worker train-draft`. Imports nothing heavy: the command line declares them at every start."""

import argparse
from pathlib import Path

DESCRIPTION = """\
Train an EAGLE draft head for a model, on this machine: the model answers prompts, and the head learns what the model
would say next. Interrupt it whenever you like; the same command goes on where it stopped. What it prints: loss, and on
texts that it is not trained on how often the first draft is right (top-1) and the tokens of a round by depth.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--model", default="default", help="the target: a directory, a GGUF file, or `default`"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="data, state and DIR/head, the result"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, metavar="N", help="time of this call; default: 60"
    )
    parser.add_argument(
        "--data-share",
        type=float,
        default=0.5,
        metavar="S",
        help="of the time for making texts; default: 0.5",
    )
    parser.add_argument(
        "--prompts", type=Path, action="append", default=[], metavar="FILE",
        help='your own prompts: JSONL, {"text": "…"} per line; half of the texts then answer them',
    )  # fmt: skip
    parser.add_argument(
        "--files",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="texts to learn from as they are",
    )
    parser.add_argument(
        "--evaluation", type=Path, action="append", default=[], metavar="FILE",
        help="prompts (JSONL) whose answers the figures are measured on; default: generated ones",
    )  # fmt: skip
    parser.add_argument(
        "--draft-vocabulary", type=int, default=8192, metavar="N", help="tokens it may propose"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; default: all cores")
