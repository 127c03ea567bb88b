"""Expected output lengths: learned per tenant and length of prompt, forgotten slowly."""

import pytest

from headrace.engine.estimate import OutputEstimates


def taught(tenant: str = "a", num_prompt: int = 100, num_output: int = 20, times: int = 200) -> OutputEstimates:
    estimates = OutputEstimates()
    for _ in range(times):
        estimates.learn(tenant, num_prompt, num_output)
    return estimates


def test_nothing_known_is_a_guess() -> None:
    assert OutputEstimates().expected("a", 100) == 128.0


def test_it_learns_what_a_tenant_gets() -> None:
    assert taught().expected("a", 100) == pytest.approx(20.0, rel=0.05)


def test_one_answer_moves_the_guess_a_little() -> None:
    assert 20.0 < taught(times=1).expected("a", 100) < 128.0


def test_prompts_of_another_length_are_apart() -> None:
    estimates = taught(num_prompt=100, num_output=20)
    for _ in range(200):
        estimates.learn("a", 5000, 400)
    assert estimates.expected("a", 100) < 0.5 * estimates.expected("a", 5000)


def test_lengths_of_one_bucket_are_together() -> None:
    assert taught(num_prompt=100).expected("a", 127) == taught(num_prompt=100).expected("a", 64)


def test_a_stranger_leans_on_everyone_and_a_tenant_on_itself() -> None:
    estimates = taught("a", num_output=20)
    stranger = estimates.expected("z", 100)
    assert estimates.expected("a", 100) < stranger < 60.0


def test_it_forgets() -> None:
    estimates = taught(num_output=20)
    for _ in range(200):
        estimates.learn("a", 100, 300)
    assert estimates.expected("a", 100) > 250.0
