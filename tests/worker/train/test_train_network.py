"""What is trained is what is served: the network over whole texts against the exported head, row by row."""

import pytest
import torch

from worker.model_runner import POST_NORM, ModelRunner
from worker.models.attention import Segment
from worker.models.loader import load_decoder
from worker.spec.eagle_layouts import load_head
from worker.train.export import export_head
from worker.train.material import read_frozen
from worker.train.network import TrainedHead

ROWS = 12
LAYERS = (2, 3, POST_NORM)


@pytest.fixture
def pair(tiny_model_dir, tmp_path):
    """A network with random weights, the same as a loaded head, and a runner that stores features."""
    target_path = tiny_model_dir(num_layers=6, dtype=torch.float32)
    frozen = read_frozen(target_path)
    network = TrainedHead(frozen.config, len(LAYERS))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            drawn = 1 + 0.1 * drawn if parameter.dim() == 1 else drawn * parameter.shape[1] ** -0.5
            parameter.copy_(drawn.bfloat16())  # what the file holds
    vocabulary = torch.tensor([0, 3, 5, 200, 257])
    export_head(network, vocabulary, LAYERS, tmp_path, "card")
    decoder = load_decoder(target_path, dtype=torch.float32, device=torch.device("cpu"))
    head = load_head(tmp_path, decoder, target_path, num_tokens=258, packing=None)
    runner = ModelRunner(decoder, num_slots=1, max_tokens=64, num_tokens=258)
    runner.keep_features(LAYERS)
    return network, head, runner, frozen, vocabulary


@torch.no_grad()
def test_every_step_is_what_drafting_computes(pair):
    network, head, runner, frozen, vocabulary = pair
    tokens = torch.tensor([(i * 37 + 5) % 256 for i in range(ROWS + 1)])
    runner.prefill(0, 0, tokens.tolist())
    features = runner.features([Segment(0, 0, ROWS)])
    outputs = network(features[None], frozen.embedding[tokens[1:]][None], 3)
    cache = head.new_kv_cache(1, 64)
    fused = head.fuse(features)
    for end in range(3, ROWS):
        # Rows 0 … end - 2 read the target's features; end - 1 and end are drafted behind them.
        known = Segment(0, 0, end - 1)
        hidden = head.forward(tokens[1:end], fused[: end - 1], [known], cache, phase="prefill")
        assert torch.allclose(hidden, outputs[0][0, : end - 1], atol=1e-4, rtol=1e-4)
        first = head.forward(
            tokens[end : end + 1], hidden[-1:], [Segment(0, end - 1, 1)], cache, phase="decode"
        )
        assert torch.allclose(first[0], outputs[1][0, end - 1], atol=1e-4, rtol=1e-4)
        second = head.forward(tokens[end + 1 : end + 2], first, [Segment(0, end, 1)], cache, phase="decode")
        assert torch.allclose(second[0], outputs[2][0, end], atol=1e-4, rtol=1e-4)
    logits = head.logits(outputs[0][0])
    assert torch.allclose(logits[:, vocabulary], outputs[0][0] @ frozen.output[vocabulary].t(), atol=1e-4)
    assert bool(torch.isneginf(logits).sum(dim=1).eq(258 - len(vocabulary)).all())
