"""`headrace bench kernels`: the arithmetic of the roofline, and every launch of both machines' benches made for real."""

from collections.abc import Sequence

import pytest
import torch

from headrace.cli.kernels.card import CardBench, CardSizes, lane_timer
from headrace.cli.kernels.processor import ProcessorSizes, measure_peaks, measure_processor
from headrace.cli.kernels.roofline import Launch, Peaks, host_seconds, judge
from headrace.cli.main import main
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.torch.probe import choose
from tests.unit.weights.files import tiny_shape

pytestmark = pytest.mark.unit

PEAKS = Peaks(bytes_per_s=1e9, flops_per_s=1e12)


def once(launches: Sequence[Launch]) -> float:
    """Makes every launch, and says that each took a second."""
    for launch in launches:
        launch()
    return 1.0


def test_the_roofline_is_what_takes_longer() -> None:
    read = judge("k", "s", 2e-3, 1e6, 1e6, PEAKS)
    assert read.bound == "memory" and read.share == pytest.approx(0.5)
    multiplied = judge("k", "s", 2e-3, 1e3, 1e9, PEAKS)
    assert multiplied.bound == "products" and multiplied.share == pytest.approx(0.5)


def test_integers_are_held_against_their_own_peak() -> None:
    peaks = Peaks(bytes_per_s=1e12, flops_per_s=1e12, integer_per_s=4e12)
    assert judge("k", "s", 1e-3, 0, 1e9, peaks, integer=True).share == pytest.approx(0.25)
    assert judge("k", "s", 1e-3, 0, 1e9, peaks).share == pytest.approx(1.0)


def test_a_timer_makes_every_launch_in_every_round() -> None:
    made = [0, 0, 0]

    def launch(place: int) -> Launch:
        def add() -> None:
            made[place] += 1

        return add

    assert host_seconds([launch(place) for place in range(3)], budget_s=0.0) > 0.0
    assert len(set(made)) == 1 and made[0] >= 3
    before = made[0]
    assert lane_timer(HostLane())([launch(place) for place in range(3)]) > 0.0
    assert made[0] > before and len(set(made)) == 1


def test_the_processors_kernels_are_all_launched() -> None:
    sizes = ProcessorSizes((1, 3), ((2, 40),), ((20, 30),), cold_bytes=1000, peak_bytes=4096, peak_width=16)
    choice = choose(tiny_shape())
    assert measure_peaks(choice, sizes, once) == Peaks(8192.0, 2 * 16**3, 2 * 16**3)
    figures = list(measure_processor(tiny_shape(), choice, sizes, PEAKS, once))
    told = [(figure.kernel, figure.size) for figure in figures]
    for dtype in ("fp32", "int8"):
        assert (f"{dtype} linear", "3 x 64 x 192") in told
    assert ("decode attention", "2 x 40") in told and ("chunk attention", "20 after 30") in told
    single = next(figure for figure in figures if (figure.kernel, figure.size) == ("fp32 linear", "1 x 64 x 192"))
    assert single.flops == 2 * 64 * 192 and single.moved_bytes == 4 * (64 * 192 + 64 + 192)
    decode = next(figure for figure in figures if figure.kernel == "decode attention")
    assert decode.moved_bytes == 2 * 40 * 2 * 4 * 2 * 16


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_cards_operations_are_all_launched_as_the_protocol_has_them(qk_norm: bool) -> None:
    sizes = CardSizes((1, 5), ((3, 40),), ((20, 0), (7, 30)), (2,), cold_bytes=1000, peak_bytes=4096, peak_width=16)
    shape = tiny_shape(qk_norm=qk_norm)
    bench = CardBench(ReferenceOps(), HostLane(), shape, sizes, once, torch.float32)
    peaks = bench.peaks()
    assert peaks == Peaks(8192.0, 2 * 16**3)
    figures = list(bench.measure(peaks))
    told = {figure.kernel for figure in figures}
    assert {"product", "one row: norm, product, gate", "add + norm", "silu x up", "turn + write"} <= told
    assert {"decode attention", "chunk attention", "sample: greedy"} <= told
    chunk = next(figure for figure in figures if figure.size == "7 after 30")
    assert chunk.flops == 4 * 16 * 4 * (7 * 30 + 7 * 8 // 2)


@pytest.mark.parametrize("argv", [["--shape", "70b"], ["--device", "tpu"]])
def test_what_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernels", *argv])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_command_tells_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.cli.kernels import processor, roofline

    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setitem(roofline.SHAPES, "135m", tiny_shape())
    small = ProcessorSizes((1,), ((1, 40),), ((20, 0),), cold_bytes=1000, peak_bytes=4096, peak_width=16)
    monkeypatch.setattr(processor, "ProcessorSizes", lambda: small)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernels", "--device", "cpu"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert "peaks, measured" in out and "int8 linear" in out and "measuring the CPU's kernels" in err
