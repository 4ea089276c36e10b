import pytest
import torch

from worker.models.linear import make_linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (16, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_product_at_every_row_count(
    dtype: torch.dtype, shape: tuple[int, int], with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    bias = torch.randn(shape[0], generator=generator, dtype=torch.float64) if with_bias else None
    layer = make_linear(weight, bias, dtype, CPU)
    assert (layer.out_features, layer.in_features) == shape
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.2}[dtype]
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 33):
        x = torch.randn(rows, shape[1], generator=generator, dtype=torch.float64)
        result = layer(x.to(dtype), "decode")
        assert result.dtype == dtype
        expected = x @ weight.t() + (0 if bias is None else bias)
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance)
