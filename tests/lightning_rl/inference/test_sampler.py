import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl.inference.sampler import Sampled, sample, stream_key, uniforms
from tests.random_examples import examples


def draw(logits, temperature=1.0, top_p=1.0, top_k=0, uniform=None, seed=0) -> Sampled:
    n = logits.shape[0]
    keys = np.full(n, stream_key(seed))
    return sample(
        logits,
        temperature=np.full(n, temperature),
        top_p=np.full(n, top_p),
        top_k=np.full(n, top_k, np.int64),
        uniform=uniforms(keys, np.arange(n)) if uniform is None else uniform,
    )


def test_samples_follow_the_softmax():
    n, logits = 40_000, torch.tensor([1.0, 0.0, -1.0, 2.0, -4.0])
    counts = np.bincount(draw(logits.expand(n, 5), temperature=0.7).token_ids, minlength=5)
    expected = (logits / 0.7).softmax(-1).numpy() * n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 23.5  # 4 degrees of freedom: 1 in 10,000


def test_truncated_samples_follow_the_renormalised_softmax():
    n, logits = 40_000, torch.tensor([1.0, 0.0, -1.0, 2.0, -4.0])
    counts = np.bincount(draw(logits.expand(n, 5), top_k=3).token_ids, minlength=5)
    weights = torch.tensor([1.0, 0.0, 2.0]).exp().numpy()
    expected = weights / weights.sum() * n
    assert counts[[2, 4]].sum() == 0
    assert ((counts[[0, 1, 3]] - expected) ** 2 / expected).sum() < 18.4


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(0, 2**32),
    st.floats(0.05, 4.0),
    st.floats(0.01, 1.0),
    st.integers(0, 12),
    st.integers(1, 40),
)
def test_top_p_and_top_k_hold_and_the_logprob_is_untruncated(seed, temperature, top_p, top_k, n):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, 12, generator=generator)
    got = draw(logits, temperature, top_p, top_k, seed=seed)
    scores = (logits / temperature).log_softmax(-1)
    for row in range(n):
        order = scores[row].argsort(descending=True, stable=True)
        kept = order[: top_k or None]
        shares = scores[row, kept].double().softmax(-1)
        allowed = kept[(shares.cumsum(-1) - shares) < top_p + 1e-6].tolist()
        assert got.token_ids[row] in allowed
        assert abs(got.logprobs[row] - scores[row, got.token_ids[row]].item()) < 1e-5
        assert got.ranks[row] == order.tolist().index(got.token_ids[row]) + 1


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-40, 1e-300])
def test_greedy_rows_take_the_argmax_with_the_logprob_of_temperature_one(temperature):
    logits = torch.randn(9, 20, generator=torch.Generator().manual_seed(1))
    got = draw(logits, temperature=temperature, top_p=0.5)
    assert got.token_ids.tolist() == logits.argmax(-1).tolist()
    assert np.allclose(got.logprobs, logits.log_softmax(-1).amax(-1).numpy(), atol=1e-6)
    assert (got.ranks == 1).all()


def test_greedy_and_sampled_rows_in_one_batch_do_not_disturb_each_other():
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    uniform = np.array([0.1, 0.9, 0.5, 0.3])
    mixed = sample(
        logits,
        temperature=np.array([0.0, 1.0, 0.5, 1.0]),
        top_p=np.array([1.0, 1.0, 1.0, 0.2]),
        top_k=np.array([0, 0, 0, 0]),
        uniform=uniform,
    )
    alone = [
        draw(logits[i : i + 1], t, p, 0, uniform[i : i + 1])
        for i, (t, p) in enumerate([(0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (1.0, 0.2)])
    ]
    assert mixed.token_ids.tolist() == [one.token_ids[0] for one in alone]
    assert mixed.logprobs.tolist() == [one.logprobs[0] for one in alone]


def test_the_ends_of_the_unit_interval_draw_tokens_of_positive_mass():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    low = draw(logits, uniform=np.array([0.0]))
    high = draw(logits, uniform=np.array([1 - 2.0**-52]))
    assert (low.token_ids[0], high.token_ids[0]) == (1, 2)


def test_a_large_vocabulary_is_drawn_from_to_its_last_token():
    # In float32 the running sum would stop growing long before the end.
    logits = torch.zeros(1, 150_000)
    for share in (0.25, 0.5, 0.999):
        got = draw(logits, uniform=np.array([share]))
        assert abs(got.token_ids[0] - share * 150_000) <= 1


def test_uniforms_are_a_function_of_seed_and_index_alone():
    keys = np.array([stream_key(seed) for seed in (0, 1, -1, 2**63)])
    at_5 = uniforms(keys, np.full(4, 5))
    assert len(set(at_5)) == 4
    assert uniforms(keys[2:3], np.array([5]))[0] == at_5[2]
    many = uniforms(np.full(20_000, keys[0]), np.arange(20_000))
    counts = np.histogram(many, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 50
    assert abs(np.corrcoef(many[1:], many[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_distribution_are_an_error(bad):
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(torch.tensor([[0.0, bad]]))


@pytest.mark.parametrize("temperatures", [[1.0], [0.0], [0.0, 0.7, 1.0]])
def test_logits_in_bfloat16_are_sampled_from_as_float32(temperatures):
    torch.manual_seed(0)
    logits = (3 * torch.randn(64, 500)).bfloat16()
    rng = np.random.default_rng(0)
    settings = {
        "temperature": rng.choice(temperatures, 64),
        "top_p": np.ones(64),
        "top_k": np.zeros(64, np.int64),
        "uniform": rng.random(64),
    }
    for rough, exact in zip(sample(logits, **settings), sample(logits.float(), **settings), strict=True):
        assert np.array_equal(rough, exact)
