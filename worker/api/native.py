"""SGLang's other native routes, as far as its clients and benchmarks read them: `/server_info`, `/model_info`.

Names are SGLang's; values are this worker's. Starts nothing.
"""

from typing import Any

from worker.api.served import ServedModel
from worker.config import WorkerConfig
from worker.protocol import SpecInfo, SpecStats

ALGORITHMS = {"ngram": "NGRAM", "model": "STANDALONE", "eagle": "EAGLE", "ngram+eagle": "EAGLE"}


class ServerInfo:
    """Builds `/server_info`. Remembers when it was last asked: that is what "last" in a throughput means here."""

    def __init__(self, model: ServedModel, config: WorkerConfig) -> None:
        self._model = model
        self._config = config
        self._last_asked = (0.0, 0)  # uptime seconds, generated tokens

    def document(self) -> dict[str, Any]:
        """Return settings, limits, and one internal state (there is one engine)."""
        info, stats = self._model.engine.info, self._model.engine.stats()
        return {
            **model_info(self._model),
            "served_model_name": info.model,
            "version": info.version,
            "device": info.device,
            "dtype": info.dtype,
            "context_length": info.max_context_tokens,
            "max_running_requests": info.max_running_requests,
            "max_total_num_tokens": stats.queue.kv_tokens_total,
            "max_req_input_len": info.max_context_tokens - 1,
            "max_queued_requests": self._config.engine.max_waiting_requests,
            "chunked_prefill_size": self._config.engine.prefill_chunk_tokens,
            "max_prefill_tokens": info.max_num_batched_tokens,
            "speculative_algorithm": ALGORITHMS.get(info.drafter),
            "speculative_eagle_topk": info.topk,
            "speculative_num_steps": info.fallback_num_steps,
            "speculative_num_draft_tokens": info.draft_tokens_at(info.fallback_num_steps),
            "speculative_adaptive": info.adaptation,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "disaggregation_mode": "null",
            "internal_states": [self._internal_state(info, stats)],
        }

    def _internal_state(self, info: SpecInfo, stats: SpecStats) -> dict[str, Any]:
        state: dict[str, Any] = {
            "speculative_num_steps": stats.plan.num_steps,
            "speculative_num_draft_tokens": info.draft_tokens_at(stats.plan.num_steps),
            "candidate_steps": info.candidate_steps,
            "last_gen_throughput": self._throughput(stats),
            "memory_usage": {"token_capacity": stats.queue.kv_tokens_total},
            "effective_max_running_requests_per_dp": info.max_running_requests,
            "num_running_reqs": stats.queue.running,
            "num_queue_reqs": stats.queue.waiting,
        }
        rounds = sum(bucket.request_rounds for bucket in stats.buckets)
        if rounds:
            # Since the start, all depths together, the target's own token included; absent before the first round.
            state["avg_spec_accept_length"] = sum(bucket.accept_tokens for bucket in stats.buckets) / rounds
        return state

    def _throughput(self, stats: SpecStats) -> float:
        """Return generated tokens per second since this was last asked, at first since the start."""
        before_seconds, before_tokens = self._last_asked
        self._last_asked = (stats.uptime_seconds, stats.generated_tokens)
        seconds = stats.uptime_seconds - before_seconds
        return (stats.generated_tokens - before_tokens) / seconds if seconds > 0 else 0.0


def model_info(model: ServedModel) -> dict[str, Any]:
    """Return `/model_info`: what is served, and where a client on this machine finds its tokenizer."""
    directory = model.tokenizer.directory
    return {"model_path": directory, "tokenizer_path": directory, "is_generation": True}
