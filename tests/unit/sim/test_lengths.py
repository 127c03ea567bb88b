"""Length distributions: one text, one mean, one set of quantiles, the same in samples and in integrals."""

from fractions import Fraction

import msgspec
import numpy as np
import pytest

from headrace.core.errors import InvalidInput
from headrace.sim.lengths import Empirical, Fixed, Lengths, LogNormal, Mixture, Uniform, parse_lengths
from headrace.sim.mix import RequestClass, RequestMix, load_mix, single_mix

CHAT = LogNormal(60, 1.0, 5, 500)
BIMODAL = Mixture(((0.9, CHAT), (0.1, Uniform(1000, 4000))))
SHAPES: list[Lengths] = [
    Fixed(25),
    Uniform(100, 1024),
    Uniform(1, 100_000),
    CHAT,
    LogNormal(3.0, 2.5, 1, 20_000),
    LogNormal(2.0, 0.5, 1000, 2000),
    Empirical(values=(3, 4, 4, 900)),
    Empirical(histogram=((10, 7), (200, 2), (5000, 1))),
    BIMODAL,
]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("25", Fixed(25)),
        ("fixed:25", Fixed(25)),
        ("uniform:100:1024", Uniform(100, 1024)),
        ("lognormal:60:1.0:5:500", CHAT),
        ("empirical:3,4,4,900", Empirical(values=(3, 4, 4, 900))),
        ("mix:0.9*lognormal:60:1.0:5:500+0.1*uniform:1000:4000", BIMODAL),
        ("mix:1*lognormal:1e+2:.5:5:500+3*7", Mixture(((1.0, LogNormal(100, 0.5, 5, 500)), (3.0, Fixed(7))))),
    ],
)
def test_the_short_text_form_is_read(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, "prompt") == lengths


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "whole number"),
        ("0", "value must be from 1 to 10,000,000"),
        ("-3", "value must be from 1"),
        ("2.5", "whole number"),
        ("99999999999", "value must be from 1"),
        ("uniform:9:3", r"low \(9\) must not exceed high \(3\)"),
        ("uniform:9", "uniform takes low:high"),
        ("lognormal:60:nan:5:500", "positive number"),
        ("lognormal:60:99:5:500", "sigma must be from"),
        ("lognormal:0:1:5:500", "median must be from"),
        ("gauss:1:2", "no distribution is called 'gauss'"),
        ("mix:uniform:1:2", "a mix is written"),
        ("mix:0*5", "weight must be from"),
        ("mix:1*mix:1*5", "needs a mix file"),
        ("empirical:", "whole number"),
        ("7" * 20_000, "at most 10,000 characters"),
    ],
)
def test_malformed_text_is_refused_in_one_line_that_names_the_option(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as refused:
        parse_lengths(text, "--prompt")
    assert refused.value.param == "--prompt"
    assert refused.value.message.startswith("--prompt: ") and "\n" not in refused.value.message


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_json_brings_back_the_same_distribution(lengths: Lengths) -> None:
    assert msgspec.json.decode(msgspec.json.encode(lengths), type=Lengths) == lengths


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_mean_quantiles_samples_and_integrals_are_of_one_distribution(lengths: Lengths) -> None:
    drawn = lengths.sample(np.random.default_rng(1), 200_000)
    values, weights = lengths.support(512)
    mean = float(lengths.mean())
    assert drawn.dtype == np.int64
    assert lengths.least <= drawn.min() and drawn.max() <= lengths.greatest
    assert weights.sum() == pytest.approx(1.0)
    # Rounding to whole tokens moves the mean of short lengths a little.
    assert float((values * weights).sum()) == pytest.approx(mean, rel=2e-3, abs=0.1)
    assert drawn.mean() == pytest.approx(mean, rel=0.02, abs=0.1)
    # The second moment of the heaviest tail here is known from 200,000 draws to a tenth.
    assert float((values**2 * weights).sum()) == pytest.approx(float((drawn.astype(float) ** 2).mean()), rel=0.1)
    for p in (0.05, 0.5, 0.95):
        assert lengths.quantile(p) == pytest.approx(np.quantile(drawn, p, method="inverted_cdf"), rel=0.03, abs=1)
    assert lengths.quantile(0.0) == lengths.least and drawn.max() <= lengths.quantile(1.0) <= lengths.greatest


def test_rational_distributions_have_rational_means() -> None:
    assert Fixed(25).mean() == Fraction(25)
    assert Uniform(1, 4).mean() == Fraction(5, 2)
    assert Empirical(values=(1, 1, 2)).mean() == Fraction(4, 3)
    assert Empirical(histogram=((1, 2), (2, 1))).mean() == Fraction(4, 3)
    mixed = Mixture(((0.9, Fixed(1)), (0.1, Uniform(1, 4)))).mean()
    assert isinstance(mixed, Fraction) and mixed == Fraction(23, 20)
    assert isinstance(BIMODAL.mean(), float)


def test_the_same_seed_draws_the_same_lengths() -> None:
    first, second = (BIMODAL.sample(np.random.default_rng(5), 100) for _ in range(2))
    assert (first == second).all()


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('{"kind":"uniform","low":1}', "high"),
        ('{"kind":"uniform","low":9,"high":3}', "low"),
        ('{"kind":"uniform","low":1,"high":3,"step":2}', "step"),
        ('{"kind":"normal"}', "kind"),
        ('{"kind":"empirical"}', "either values or histogram"),
        ('{"kind":"empirical","values":[1],"histogram":[[1,1]]}', "either values or histogram"),
        ('{"kind":"empirical","histogram":[[5,0]]}', "histogram count"),
        ('{"kind":"mixture","parts":[]}', "parts"),
        ('{"kind":"mixture","parts":[[-1,{"kind":"fixed","value":2}]]}', "weight"),
    ],
)
def test_malformed_files_are_refused_where_they_are_wrong(body: str, place: str) -> None:
    with pytest.raises(InvalidInput, match=place):
        load_mix({"prompt": msgspec.json.decode(body), "output": 5}, "--mix")


def test_a_kind_that_there_is_not_is_told_those_that_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"possible are .*uniform.*mixture"):
        load_mix({"prompt": {"kind": "normal"}, "output": 5}, "--mix")
    with pytest.raises(InvalidInput, match="possible are classes"):
        load_mix({"classes": [], "kinds": []}, "--mix")


def test_mixtures_nest_only_so_deep() -> None:
    lengths: Lengths = Fixed(3)
    for _ in range(4):
        lengths = Mixture(((1.0, lengths),))
    with pytest.raises(ValueError, match="nested 4 deep"):
        Mixture(((1.0, lengths),))


def test_a_mix_file_may_hold_one_kind_of_request_or_several() -> None:
    one = load_mix({"prompt": "uniform:1:9", "output": {"kind": "fixed", "value": 5}}, "--mix")
    assert one == single_mix(Uniform(1, 9), Fixed(5))
    raw = {"classes": [{"prompt": 100, "output": 10, "weight": 9}, {"prompt": 4000, "output": 500, "weight": 1}]}
    several = load_mix(raw, "--mix")
    assert several.prompt_mean() == Fraction(490) and several.output_mean() == Fraction(59)
    assert several.longest() == 4500


def test_prompt_and_output_correlate_between_kinds() -> None:
    mix = RequestMix((RequestClass(Fixed(10), Fixed(1), 0.5), RequestClass(Fixed(1000), Fixed(100), 0.5)))
    prompts, outputs = mix.sample(np.random.default_rng(2), 1000)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(10, 1), (1000, 100)}


@pytest.mark.parametrize(
    "raw",
    [None, [], {}, {"classes": []}, {"prompt": 5}, {"prompt": 5, "output": 0}, {"prompt": 5, "output": 5, "weight": 0}],
    ids=str,
)
def test_a_malformed_mix_is_refused(raw: object) -> None:
    with pytest.raises(InvalidInput, match="--mix: "):
        load_mix(raw, "--mix")
