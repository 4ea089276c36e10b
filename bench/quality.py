"""`python -m bench.quality`: what packed weights cost, against float32 on held-out text of this repository.

Perplexity and the share of places where both find the same most likely token (top-1 agreement), by teacher forcing.
Texts: `bench/texts` (prompts of all kinds), the documents, and source code; the model was not trained on any of them,
and nothing of ours was tuned on them. Windows of `--window` tokens; a window's first token is not judged. Prints a
table and one line of JSON.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.models.attention import Segment
from worker.models.decoder import Decoder
from worker.models.fetch import ensure_default_model
from worker.models.loader import load_decoder, load_tokenizer
from worker.models.packed import Packing

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "prompts": ["bench/texts/*.jsonl", "bench/texts/eval/*.jsonl"],
    "docs": ["docs/design.md", "docs/api.md", "docs/operating.md"],
    "code": ["worker/engine.py", "worker/scheduler.py", "worker/spec/plan.py", "controller/loop.py"],
}
ARMS: dict[str, Packing | None] = {"float32": None, "int8": "int8", "int4": "int4"}


def read(pattern: str) -> str:
    """Return the files of a pattern as one text; of JSON lines their texts."""
    parts = []
    for path in sorted(ROOT.glob(pattern)):
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            content = "\n\n".join(json.loads(line)["text"] for line in content.splitlines())
        parts.append(content)
    return "\n\n".join(parts)


def windows(tokenizer: Any, kind: str, size: int, tokens: int) -> list[Tensor]:
    """Return the first `tokens` tokens of each kind's texts, taken evenly from them, cut into windows."""
    patterns = KINDS[kind]
    share = tokens // len(patterns)
    cut: list[Tensor] = []
    for pattern in patterns:
        ids = torch.tensor(tokenizer(read(pattern), add_special_tokens=False)["input_ids"][:share])
        cut += [window for window in ids.split(size) if len(window) > 1]
    return cut


def judge(decoder: Decoder, texts: list[Tensor]) -> tuple[float, Tensor]:
    """Return the mean negative log-likelihood, and the most likely token at each place."""
    losses, best = [], []
    kv = decoder.new_kv_cache(1, max(len(text) for text in texts))
    for text in texts:
        hidden = decoder.forward(text, [Segment(0, 0, len(text))], kv, phase="prefill")
        for rows, targets in zip(hidden[:-1].split(64), text[1:].split(64), strict=True):
            logits = decoder.logits(rows).float()
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
            best.append(logits.argmax(dim=1))
    return float(torch.cat(losses).double().mean()), torch.cat(best)


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of each kind of text (default 2048)")
    parser.add_argument("--window", type=int, default=512, help="tokens that see one another (default 512)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    directory = ensure_default_model()
    tokenizer = load_tokenizer(directory)
    texts = {kind: windows(tokenizer, kind, options.window, options.tokens) for kind in KINDS}
    rows: list[dict[str, Any]] = []
    reference: dict[str, Tensor] = {}
    print(
        f"{'text':>8} {'tokens':>6} {'weights':>8} {'perplexity':>10} {'against float32':>15} {'top-1 agreement':>15}"
    )
    for arm, packing in ARMS.items():
        dtype = torch.bfloat16 if packing else torch.float32
        decoder = load_decoder(directory, dtype=dtype, device=torch.device("cpu"), packing=packing)
        for kind, parts in texts.items():
            loss, best = judge(decoder, parts)
            truth = reference.setdefault(kind, best)
            row = {
                "text": kind,
                "tokens": len(best),
                "weights": arm,
                "perplexity": round(math.exp(loss), 3),
                "top1_agreement": round(float((best == truth).float().mean()), 4),
            }
            base = next(r["perplexity"] for r in [*rows, row] if r["text"] == kind)
            rows.append(row)
            ratio = row["perplexity"] / base
            print(
                f"{kind:>8} {row['tokens']:>6} {arm:>8} {row['perplexity']:>10.2f} {ratio:>15.4f} "
                f"{row['top1_agreement']:>15.4f}",
                flush=True,
            )
        del decoder
    print(json.dumps({"bench": "quality", "window": options.window, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
