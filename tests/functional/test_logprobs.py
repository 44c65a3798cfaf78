from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from avspo_lightning.functional import logprobs_from_hidden, self_certainty, token_entropy, token_logprobs
from tests.functional.reference import GOLDEN, assert_close

TEMPERATURES = pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])


def loop_statistics(logits: list[float], token: int, temperature: float) -> tuple[float, float, float]:
    """Log-probability, entropy and KL(U || p) by hand."""
    weights = [math.exp(logit / temperature) for logit in logits]
    probabilities = [weight / math.fsum(weights) for weight in weights]
    entropy = -math.fsum(p * math.log(p) for p in probabilities)
    certainty = math.fsum(math.log(1 / len(logits) / p) for p in probabilities) / len(logits)
    return math.log(probabilities[token]), entropy, certainty


@TEMPERATURES
def test_every_quantity_matches_a_hand_computation(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator) * 3
    token_ids = torch.randint(0, 5, (2, 3), generator=generator)
    expected = torch.tensor(
        [
            [loop_statistics(logits[r, t].tolist(), int(token_ids[r, t]), temperature) for t in range(3)]
            for r in range(2)
        ],
        dtype=torch.float64,
    )
    for dtype in (torch.float64, torch.float32):
        given = logits.to(dtype)
        assert_close(token_logprobs(given, token_ids, temperature=temperature), expected[..., 0], dtype)
        assert_close(token_entropy(given, temperature=temperature), expected[..., 1], dtype)
        assert_close(self_certainty(given, temperature=temperature), expected[..., 2], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_self_certainty_and_entropy(dtype: torch.dtype) -> None:
    section = GOLDEN["intuitor"]
    logits, mask = torch.tensor(section["logits"], dtype=dtype), torch.tensor(section["mask"], dtype=dtype)
    certainty = self_certainty(logits)
    assert_close(certainty, section["self_certainty_kl"], dtype)
    assert_close(certainty + math.log(5), section["self_certainty_repo"], dtype)
    assert_close((certainty * mask).sum(-1) / mask.sum(-1), section["seq_mean_kl"], dtype)
    section = GOLDEN["rent"]
    entropy = token_entropy(torch.tensor(section["logits"], dtype=dtype))
    assert_close(entropy, section["token_entropy"], dtype)
    assert_close(-(entropy * mask).sum(-1) / mask.sum(-1), section["reward_neg_mean_entropy"], dtype)


@TEMPERATURES
def test_a_rollout_scored_by_hand_gives_ratio_one(temperature: float) -> None:
    logits = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1))
    token_ids = torch.tensor([[0, 5, 2, 2]])
    rollout = [loop_statistics(logits[0, t].tolist(), int(token_ids[0, t]), temperature)[0] for t in range(4)]
    ratio = (token_logprobs(logits, token_ids, temperature=temperature)[0] - torch.tensor(rollout)).exp()
    assert (ratio - 1).abs().max() < 1e-5


def test_views_of_logits_survive_backward_unchanged() -> None:
    hidden = torch.randn(3, 4, 8, requires_grad=True, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(8, 5, requires_grad=True, generator=torch.Generator().manual_seed(1))
    logits = (hidden @ weight)[:, :-1]
    before = logits.detach().clone()
    token_ids = torch.zeros(3, 3, dtype=torch.int64)
    (token_logprobs(logits, token_ids, temperature=0.5).sum() + token_entropy(logits, temperature=0.5).sum()).backward()
    assert torch.equal(logits.detach(), before)
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    token_ids = torch.randint(0, 500, (2, 3), generator=torch.Generator().manual_seed(1))
    for temperature in (1.0, 0.7):
        low, exact = (token_logprobs(z, token_ids, temperature=temperature) for z in (logits, logits.double()))
        assert low.dtype == torch.float32
        assert_close(low, exact, torch.float32)
        assert_close(token_entropy(logits, temperature=temperature),
                     token_entropy(logits.double(), temperature=temperature), torch.float32)  # fmt: skip


def test_forbidden_and_vanishing_tokens_leave_entropy_and_gradients_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, -1e4]], requires_grad=True)
    entropy = token_entropy(logits)
    assert_close(entropy, [math.log(2)] * 2, torch.float32)
    (entropy.sum() + token_logprobs(logits, torch.tensor([0, 1])).sum()).backward()
    assert_close(logits.grad, [[0.5, -0.5, 0.0], [-0.5, 0.5, 0.0]], torch.float32)


def test_gradients_match_finite_differences() -> None:
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    token_ids = torch.tensor([[0, 3, 1], [2, 2, 0]])
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, token_ids, temperature=0.7), (logits,))
    assert torch.autograd.gradcheck(lambda z: token_entropy(z, temperature=0.7), (logits,))
    assert torch.autograd.gradcheck(lambda z: self_certainty(z, temperature=0.7), (logits,))


class CappedHead(nn.Module):
    """Logits as some model families make them: scaled, then squashed."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(9)))

    def forward(self, hidden: Tensor) -> Tensor:
        return 5.0 * torch.tanh(hidden @ self.weight.T / 5.0)


@TEMPERATURES
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 7, 100])
def test_chunks_equal_the_whole(tokens_per_chunk: int, temperature: float) -> None:
    head = CappedHead(6, 11).double()
    hidden = torch.randn(7, 6, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    token_ids = torch.randint(0, 11, (7,), generator=torch.Generator().manual_seed(1))
    weights = torch.linspace(-1, 1, 7, dtype=torch.float64)
    inputs = (hidden, head.weight)

    whole = token_logprobs(head(hidden), token_ids, temperature=temperature)
    chunked = logprobs_from_hidden(
        hidden, head, token_ids, temperature=temperature, chunk_bytes=4 * 11 * tokens_per_chunk,
        with_entropy=True, with_self_certainty=True,
    )  # fmt: skip
    assert_close(chunked.logprobs, whole)
    assert_close(chunked.entropy, token_entropy(head(hidden), temperature=temperature))
    assert_close(chunked.self_certainty, self_certainty(head(hidden), temperature=temperature))
    assert not chunked.entropy.requires_grad
    assert not chunked.self_certainty.requires_grad
    expected = torch.autograd.grad((whole * weights).sum(), inputs)
    for actual, gradient in zip(torch.autograd.grad((chunked.logprobs * weights).sum(), inputs), expected, strict=True):
        assert_close(actual, gradient)


def test_chunked_gradients_match_finite_differences() -> None:
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1))
    token_ids = torch.tensor([0, 3, 1, 1, 2])

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        return logprobs_from_hidden(hidden, lambda h: h @ weight.T, token_ids, temperature=0.7, chunk_bytes=32).logprobs

    assert torch.autograd.gradcheck(run, (hidden, weight))


def test_without_gradient_and_without_tokens() -> None:
    head = CappedHead(6, 11)
    hidden, token_ids = torch.randn(7, 6), torch.arange(7)
    with torch.no_grad():
        quiet = logprobs_from_hidden(hidden, head, token_ids, chunk_bytes=88)
    assert not quiet.logprobs.requires_grad
    assert quiet.entropy is None
    assert quiet.self_certainty is None
    assert_close(quiet.logprobs, token_logprobs(head(hidden), token_ids), torch.float32)
    empty = logprobs_from_hidden(hidden[:0], head, token_ids[:0], with_entropy=True)
    assert empty.logprobs.shape == empty.entropy.shape == (0,)
    empty.logprobs.sum().backward()


class PeakBytes(TorchDispatchMode):
    """Bytes of all storages made under it, now and at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in self.sizes:
                self.sizes[key] = leaf.untyped_storage().nbytes()
                self.live += self.sizes[key]
                self.peak = max(self.peak, self.live)
                weakref.finalize(leaf.untyped_storage(), self._free, key)
        return result

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def test_no_tensor_of_tokens_by_vocabulary_is_ever_held() -> None:
    num_tokens, hidden_size, vocab_size = 2 * 256, 16, 50_000
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).requires_grad_()
    weight = torch.randn(vocab_size, hidden_size, generator=generator).requires_grad_()
    token_ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    full = num_tokens * vocab_size * 4
    logits: list[weakref.ref[Tensor]] = []

    def head(hidden: Tensor) -> Tensor:
        result = hidden @ weight.T
        logits.append(weakref.ref(result))
        return result

    def run(chunked: bool) -> tuple[PeakBytes, Tensor, list[Tensor]]:
        hidden.grad = weight.grad = None
        with PeakBytes() as memory:
            if chunked:
                logprobs = logprobs_from_hidden(hidden, head, token_ids, temperature=0.7, with_entropy=True).logprobs
            else:
                logprobs = token_logprobs(hidden @ weight.T, token_ids, temperature=0.7)
            logprobs.mean().backward()
        return memory, logprobs.detach(), [hidden.grad, weight.grad]

    naive, expected, expected_gradients = run(chunked=False)
    assert naive.peak > 2 * full  # the instrument sees what it should
    lean, actual, gradients = run(chunked=True)
    assert lean.peak < full / 4
    assert len(logits) > 16
    assert not any(reference() is not None for reference in logits)
    assert (actual - expected).abs().max() < 1e-5
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert (gradient - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_wrong_options_are_refused() -> None:
    logits, ids = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="`temperature`"):
            token_logprobs(logits, ids, temperature=temperature)
    with pytest.raises(ValueError, match="`chunk_bytes`"):
        logprobs_from_hidden(logits, nn.Identity(), ids, chunk_bytes=0)
