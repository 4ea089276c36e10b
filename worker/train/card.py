"""The model card of a trained head: what it was made of, how, and what it reaches where."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.train.data import Text
from worker.train.evaluate import Figures
from worker.train.optimise import Progress, Recipe

DEPTHS = (1, 2, 3, 5)


def model_card(
    target: str,
    texts: Sequence[Text],
    evaluation: Sequence[Path],
    figures: Mapping[str, Figures],
    progress: Progress,
    recipe: Recipe,
    draft_vocab_size: int,
) -> str:
    """Return the card as Markdown."""
    tokens = sum(len(text.token_ids) for text in texts)
    answered = sum(text.answer_tokens for text in texts if text.prompt_length)
    rows = [
        f"| {name} | {figure.top1:.3f} | "
        + " | ".join(f"{figure.accept_length(depth):.2f}" for depth in DEPTHS)
        + f" | {figure.places} |"
        for name, figure in figures.items()
    ]
    shas = [f"- `{path.name}`: `{hashlib.sha256(path.read_bytes()).hexdigest()}`" for path in evaluation]
    return "\n".join(
        [
            f"# A draft head for {target}",
            "",
            "An EAGLE head (one decoder layer over the token's embedding and the target's hidden states), made with",
            "`spec-worker train-draft`. It proposes tokens; the target decides, so it never changes a text.",
            "",
            "## Figures",
            "",
            "Greedy answers of the target to the evaluation prompts, float32; `accept_length` is the expected number",
            "of tokens of a round at a depth, the target's own included.",
            "",
            "| text | top-1 | " + " | ".join(f"accept_length @{depth}" for depth in DEPTHS) + " | places |",
            "|---|---|" + "---|" * len(DEPTHS) + "---|",
            *rows,
            "",
            "Evaluation prompts (sha256), not used in training:",
            "",
            *shas,
            "",
            "## Data and recipe",
            "",
            f"{len(texts)} texts, {tokens} tokens, of which the target wrote {answered} (greedy or sampled answers to",
            "generated prompts: questions, code, prose, repetition); the rest are prompts and pieces of files.",
            f"{progress.epochs} epochs, {progress.batches} batches, {progress.rows} rows.",
            "",
            f"Soft labels (the target's 16 likeliest tokens), hidden-state loss, {recipe.num_steps} steps of its own",
            f"hidden states, Muon at {recipe.matrix_rate}, {draft_vocab_size} draft tokens whose output rows are the",
            "target's own.",
            "",
            "## Limits",
            "",
            "It goes with this target only. It has seen short English chats, code and lists: on other languages and",
            "long texts it proposes little that is right, which costs time and nothing else.",
            "",
        ]
    )
