"""Draft and target: whose tokens must be the same, whose sizes need not be, and whose memory must fit together."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from worker import build, pairing
from worker.api.served import ServedModel
from worker.build import build_engine
from worker.config import WorkerConfig
from worker.memory import MemoryTooSmall
from worker.models.attention import Segment
from worker.models.config import ModelError, read_config
from worker.models.loader import load_decoder, load_tokenizer, token_count
from worker.models.store import MODELS_DIR_VARIABLE
from worker.pairing import check_same_tokens
from worker.server import create_app
from worker.tokenization import Tokenizer

PROMPT = list(b"A pair of models, one text")
NUM_TOKENS = 258


def change_tokenizer(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = directory / "tokenizer.json"
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    return directory


@pytest.fixture
def build_pair() -> Callable[..., Any]:
    def make(target: Path, draft: Path | None, **engine: Any) -> Any:
        spec = {"drafter": "ngram"} if draft is None else {"drafter": "model", "draft_model_path": str(draft)}
        return build_engine(
            WorkerConfig(
                model={"path": str(target), "dtype": "float64", "device": "cpu", "threads": 1},
                spec={**spec, "num_steps": 0},
                engine={"max_running_requests": 2, "max_context_tokens": 128, "prefill_chunk_tokens": 32,
                        "profile_seconds": 0, **engine},
            )
        )  # fmt: skip

    return make


# ---- padded vocabularies ----


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.9, "seed": 6, "top_p": 0.9}]
)
@pytest.mark.parametrize(("target", "draft"), [(8, 0), (0, 8), (8, 16), (16, 8)])
def test_padding_of_either_embedding_changes_nothing(
    make_rig: Callable[..., Any], target: int, draft: int, params: dict[str, Any]
) -> None:
    plain = make_rig(engine={"profile_seconds": 0}).generate(PROMPT, max_tokens=40, **params).tokens
    rig = make_rig(target={"padding": target}, draft={"padding": draft}, engine={"profile_seconds": 0})
    for num_steps in (0, 1, 3, 7):
        rig.set_depth(num_steps)
        done = rig.generate(PROMPT, max_tokens=40, **params)
        assert max(done.tokens) < NUM_TOKENS
        assert done.tokens == plain
    for bucket in rig.thread.stats().buckets:
        assert bucket.correct == bucket.reached, "the same model but for its padding is always right"
    rig.assert_idle_and_clean()


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_poor_draft_never_shows_in_the_text(make_rig: Callable[..., Any], drafter: str) -> None:
    plain = make_rig(engine={"profile_seconds": 0}).generate(PROMPT, max_tokens=40).tokens
    draft = {"seed": 99, "padding": 8} if drafter == "model" else None
    rig = make_rig(target={"padding": 8}, drafter=drafter, draft=draft, engine={"profile_seconds": 0})
    rig.set_depth(5)
    done = rig.generate(PROMPT, max_tokens=40)
    assert done.tokens == plain
    rig.assert_idle_and_clean()


def test_unmasked_padding_would_win(tiny_model_dir: Callable[..., Path]) -> None:
    """Or the tests above would prove nothing."""
    decoder = load_decoder(tiny_model_dir(padding=8), dtype=torch.float64, device=torch.device("cpu"))
    hidden = decoder.forward(
        torch.tensor(PROMPT), [Segment(0, 0, len(PROMPT))], decoder.new_kv_cache(1, 64), phase="prefill"
    )
    assert (decoder.logits(hidden).argmax(1) >= NUM_TOKENS).all()


def test_an_id_in_the_padding_is_a_clients_mistake(
    tiny_model_dir: Callable[..., Path], build_pair: Callable[..., Any]
) -> None:
    """The target has a row for it and the draft has none: neither may see it."""
    target = tiny_model_dir(padding=8)
    thread = build_pair(target, tiny_model_dir())
    config = WorkerConfig(server={"port": 0, "control_port": 0})
    app = create_app(ServedModel(thread, Tokenizer.load(target)), config, registry=CollectorRegistry())
    thread.start()
    try:
        with TestClient(app) as client:
            sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
            for bad in (258, 265, 266, -1):
                answer = client.post("/generate", json={"input_ids": [1, bad], "sampling_params": sampling})
                assert answer.status_code == 400, answer.text
                assert "input_ids" in answer.text
            answer = client.post("/generate", json={"input_ids": [1, 257], "sampling_params": sampling})
            assert answer.json()["meta_info"]["completion_tokens"] == 4
    finally:
        thread.shutdown(0)


@pytest.mark.parametrize("narrow", ["target", "draft"])
def test_an_embedding_without_a_row_for_every_token_is_refused(
    narrow: str, tiny_model_dir: Callable[..., Path], tmp_path: Path, build_pair: Callable[..., Any]
) -> None:
    whole = tiny_model_dir()
    cut = Path(shutil.copytree(tiny_model_dir(vocab_size=250), tmp_path / "cut"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(whole / name, cut / name)
    with pytest.raises(ModelError, match=r"cut: vocab_size 250 is below the tokenizer's 258 tokens"):
        build_pair(cut if narrow == "target" else whole, cut if narrow == "draft" else whole)


def test_ids_behind_a_hole_count(tiny_model_dir: Callable[..., Path]) -> None:
    class WithHole:
        @staticmethod
        def get_vocab() -> dict[str, int]:
            return {"b": 7, "a": 0}

    assert token_count(WithHole()) == 8
    assert token_count(load_tokenizer(tiny_model_dir())) == NUM_TOKENS


# ---- the same tokens ----


def swap(stored: dict[str, Any]) -> None:
    vocabulary = stored["model"]["vocab"]
    vocabulary["a"], vocabulary["Z"] = vocabulary["Z"], vocabulary["a"]


def other_special(stored: dict[str, Any]) -> None:
    stored["added_tokens"][-1]["content"] = "<|done|>"
    vocabulary = stored["model"]["vocab"]
    vocabulary.pop("<|im_end|>", None)


def one_more(stored: dict[str, Any]) -> None:
    stored["added_tokens"].append(stored["added_tokens"][-1] | {"id": 258, "content": "<|more|>"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, "differs from the target's at id 90: 'a' instead of 'Z'"),
        (other_special, r"at id 257: '<\|done\|>' instead of '<\|im_end\|>'"),
        (one_more, r"at id 258: '<\|more\|>' instead of None"),
    ],
)
def test_another_vocabulary_is_refused_naming_the_first_difference(
    change: Callable[[dict[str, Any]], None],
    message: str,
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
    build_pair: Callable[..., Any],
) -> None:
    target = tiny_model_dir(padding=8)
    draft = change_tokenizer(Path(shutil.copytree(target, tmp_path / "draft")), change)
    config = json.loads((draft / "tokenizer_config.json").read_text()) | {
        "eos_token": None,
        "pad_token": None,
    }
    (draft / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        build_pair(target, draft)


def test_the_same_strings_in_another_order_of_the_file_are_the_same(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    def reverse(stored: dict[str, Any]) -> None:
        stored["model"]["vocab"] = dict(reversed(stored["model"]["vocab"].items()))

    target = tiny_model_dir()
    draft = change_tokenizer(Path(shutil.copytree(target, tmp_path / "draft")), reverse)
    check_same_tokens(load_tokenizer(target), load_tokenizer(draft), draft)


# ---- files ----


def test_a_pair_of_gguf_files_is_served(
    tiny_model_dir: Callable[..., Path],
    gguf_writer: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build_pair: Callable[..., Any],
) -> None:
    monkeypatch.setenv(MODELS_DIR_VARIABLE, str(tmp_path / "models"))
    parameters = {"vocab_size": 266, "dtype": torch.float32}
    paths = [
        gguf_writer.write_gguf(tmp_path / "large.gguf", tiny_model_dir(**parameters), "llama"),
        gguf_writer.write_gguf(
            tmp_path / "small.gguf",
            tiny_model_dir(**parameters, architecture="Qwen3ForCausalLM", head_dim=16, num_layers=1),
            "qwen3",
        ),
    ]
    thread = build_pair(*paths)  # the self-check compares every depth with plain decoding
    assert thread.info.model == "large"
    assert thread.info.drafter == "model"


# ---- memory and lengths ----


def test_the_caches_bound_is_of_both(
    tiny_model_dir: Callable[..., Path], build_pair: Callable[..., Any]
) -> None:
    directory = tiny_model_dir()
    config = read_config(directory)
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 8
    target, draft = 2 * 128 * token, 2 * 192 * token  # two slots; the draft's has room for the deepest tier
    build_pair(directory, None, max_kv_bytes=target)
    build_pair(directory, directory, max_kv_bytes=target + draft)
    with pytest.raises(MemoryTooSmall, match=f"engine.max_kv_bytes {target + draft - 1} .*draft kv"):
        build_pair(directory, directory, max_kv_bytes=target + draft - 1)


def test_a_machine_that_is_too_small_is_noticed_before_anything_is_loaded(
    tiny_model_dir: Callable[..., Path],
    build_pair: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = tiny_model_dir()
    with caplog.at_level(logging.INFO, "worker.build"):
        build_pair(directory, directory)
    assert any(
        line.startswith("memory: target weights") and "draft weights" in line for line in caplog.messages
    )

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(pairing, "load_decoder", refuse)
    monkeypatch.setattr(build, "available_bytes", lambda _: 100_000)
    with pytest.raises(MemoryTooSmall, match=r"100 kB of memory can be had, not enough for target weights"):
        build_pair(directory, directory)


def test_a_draft_with_fewer_positions_is_told_once(
    tiny_model_dir: Callable[..., Path], build_pair: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    build_pair(tiny_model_dir(), tiny_model_dir(max_positions=64))
    told = [line for line in caplog.messages if "64 positions" in line]
    assert len(told) == 1
