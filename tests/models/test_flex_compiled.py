"""flex_attention as torch compiles it: on a CPU its forward pass alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache
from torch.nn.attention.flex_attention import flex_attention

from rlpipe.models import flex
from rlpipe.models.flex import BLOCK, block_mask, texts_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile"
)  # what it is compared with


@pytest.fixture(autouse=True)
def kernels_of_its_own() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@inductor.patch({"compile_threads": 1, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False})  # half the time
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_inductor_makes_a_kernel_of_it() -> None:
    """What runs on a GPU, on a CPU: warnings of inductor are errors here.

    It has no backward pass and no lse for a CPU.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 2 * BLOCK, 16, generator=generator) for heads in (4, 2, 2))
    positions_RL = torch.arange(2 * BLOCK)[None].repeat(2, 1) % 150
    text_RL = texts_of(positions_RL)
    mask = block_mask(text_RL, text_RL, positions_RL, positions_RL - 100 + 1)
    how = {"block_mask": mask, "scale": 0.25, "enable_gqa": True}
    with torch.no_grad(), fresh_cache():
        assert torch.allclose(
            flex.compiled()(query, key, value, **how), flex_attention(query, key, value, **how), atol=1e-5
        )


@pytest.mark.slow
def test_a_kernel_is_made_and_found_in_any_thread() -> None:
    """Activations are recomputed in autograd's threads; a scale is part of a kernel there too, and
    torch's own settings stay."""
    counters.clear()
    query = torch.zeros(1, 2, BLOCK, 16)
    before = torch._dynamo.config.specialize_float, torch._dynamo.config.recompile_limit
    made: list[int] = []
    with ThreadPoolExecutor(1) as here, ThreadPoolExecutor(1) as there:
        for thread, scale in ((here, 0.25), (there, 0.25), (there, 0.5), (here, 0.5), (here, 0.75)):
            thread.submit(flex.compiled("eager"), query, query, query, scale=scale).result()
            made.append(counters["stats"]["unique_graphs"])
    assert made == [1, 1, 2, 2, 3]
    assert before == (torch._dynamo.config.specialize_float, torch._dynamo.config.recompile_limit)
