import math

import pytest
from rich.cells import cell_len

from rallypoint.display.text import bar_cells, clean, clock_time, limits, resample, shorten, sparkline, stretch
from rallypoint.observability.numbers import number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;new title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPpayload\x1b\\x", "x"),
        ("\x9b2Jx", "x"),
        ("\x1b", ""),
        ("a\r\n\tb", "a b"),
        ("bell\x07back\x08", "bellback"),
        ("\u202eevil\u202c\u200b\ufeff", "evil"),
        ("\ud800", ""),
        ("[red]kept[/red]", "[red]kept[/red]"),
        ("e" + "\u0301" * 500, "e\u0301\u0301"),
        ("数字", "数字"),
        ("", ""),
    ],
)
def test_a_models_text_cannot_steer_the_terminal(text: str, expected: str) -> None:
    assert clean(text) == expected


def test_a_text_of_millions_of_characters_is_read_at_its_ends_only() -> None:
    assert clean("a" * 3_000_000 + "b", max_chars=3) == "aaa…aab"


@pytest.mark.parametrize("text", ["hello world", "数字数字数字数字", "a数b字c数d字e", "x" * 1000, "👍👍👍👍👍👍"])
@pytest.mark.parametrize("cells", range(13))
def test_a_shortened_text_is_never_wider_than_its_place(text: str, cells: int) -> None:
    assert cell_len(shorten(text, cells)) <= cells


def test_a_shortened_text_keeps_its_head_and_its_tail() -> None:
    assert shorten("abcdefghijklmnopqrstuvwxyz", 11) == "abcdef…wxyz"
    assert shorten("short", 5) == "short"


def test_a_sparkline_is_as_wide_as_its_values_until_the_place_is_full() -> None:
    assert sparkline([1.0, 2.0], 10) == ["▄█"]
    assert len(sparkline([1.0] * 1000, 10)[0]) == 10


@pytest.mark.parametrize("height", [1, 2, 3])
def test_a_sparkline_of_nothing_or_of_nan_is_blank(height: int) -> None:
    assert sparkline([], 10, height) == [""] * height
    assert sparkline([math.nan, math.inf], 10, height) == ["  "] * height


def test_a_column_without_a_number_is_blank_among_others() -> None:
    assert sparkline([1.0, math.nan, 1.0], 3) == ["█ █"]


def test_a_sparkline_of_zeros_is_low_and_of_negative_values_stands_on_the_lowest() -> None:
    assert sparkline([0.0, 0.0], 2) == ["▁▁"]
    assert sparkline([-4.0, -2.0, 0.0], 3) == ["▁▄█"]
    assert sparkline([-1.0], 1) == ["▁"]


def test_a_tall_sparkline_fills_from_the_bottom() -> None:
    assert sparkline([1.0, 2.0], 2, height=2) == [" █", "██"]


def test_resampling_and_stretching_keep_the_order_and_hit_the_width() -> None:
    assert resample([1.0, 2.0, 3.0, 4.0], 2) == [1.5, 3.5]
    assert stretch([1.0, 2.0], 4) == [1.0, 1.0, 2.0, 2.0]
    assert stretch([], 4) == []
    assert resample([], 0) == resample([1.0], 0) == stretch([1.0], 0) == []


def test_the_cells_of_a_stacked_bar_add_up_to_its_width() -> None:
    for width in range(40):
        assert sum(bar_cells({"a": 0.333, "b": 0.333, "c": 0.334}, width).values()) == width
    assert bar_cells({"a": 0.0}, 10) == {"a": 0}
    assert bar_cells({}, 10) == {}


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-9, -1e-9, 0.09999, 0.99999, 9.9999, 99.99, -999.9, 123456.0, 9.99e17])
def test_a_number_stays_within_its_column(value: float) -> None:
    assert len(number(value)) <= 7


@pytest.mark.parametrize(("value", "expected"), [(math.nan, "nan"), (math.inf, "inf"), (None, "-"), (0.0, "0.000")])
def test_an_odd_number_is_written_as_what_it_is(value: float | None, expected: str) -> None:
    assert number(value) == expected


def test_a_negative_or_endless_duration_is_written_without_nonsense() -> None:
    assert clock_time(-3.0) == "0:00:00"
    assert clock_time(math.inf) == "-:--:--"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.4, 0.45, 0.5], (0.395, 0.505)),  # fills it
        ([0.499, 0.501], (0.4444, 0.5556)),  # noise: the axis is a fifth of its height, at least
        ([0.1, 0.9], (0.0, 0.945)),
        ([0.0, 0.5], (0.0, 0.525)),
        ([0.0, 0.0], (0.0, 1.0)),
        ([-50.0, -45.0, math.nan], (-53.0, -42.0)),
        ([-0.2, 0.3], (-0.225, 0.325)),
        ([], (0.0, 1.0)),
    ],
)
def test_a_narrow_band_fills_the_axis_and_noise_does_not(values: list[float], expected: tuple[float, float]) -> None:
    assert limits(values) == pytest.approx(expected, abs=1e-3)
