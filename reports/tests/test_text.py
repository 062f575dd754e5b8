"""Foreign text is harmless, numbers are readable."""

from __future__ import annotations

import math

import pytest

from reports.text import TIMES, clean, md, md_block, md_code, number, seconds, shorten, size, times

HOSTILE = "a|b <script>alert(1)</script> ](javascript:alert(1)) `x` @team #12 \x1b[31m[bold]\n# head \u202e"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (0.0, "0"),
        (0.0285, "0.0285"),
        (9.999, "10"),
        (1600.0, "1,600"),
        (8.1e5, "8.1e5"),
        (1.5e-7, "1.5e-7"),
        (-0.25, "-0.25"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_units() -> None:
    assert [seconds(s) for s in (2e-5, 0.0204, 1.25, 119.6, 125.0, 7260.0)] == [
        "20 µs",
        "20.4 ms",
        "1.25 s",
        "120 s",
        "2 min 05 s",
        "2 h 01 min",
    ]
    assert seconds(0.0) == "0 s"
    assert seconds(None) == seconds(math.nan) == "\u2013"
    assert size(400 * 2**20) == "400 MiB"
    assert size(3 * 2**30) == "3.00 GiB"
    assert times(10.0) == f"10{TIMES}"
    assert times(math.inf) == f"∞{TIMES}"


def test_clean_spells_out_what_cannot_be_seen() -> None:
    assert clean("\x1b[31mred\x07\u202e\u200b\x9b") == "\\x1b[31mred\\x07\\u202e\\u200b\\x9b"
    assert clean("a\r\n  b\tc") == "a b    c"
    assert clean("a\nb", newlines=True) == "a\nb"
    assert clean(None) == ""


def test_shorten_marks_the_cut() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcd …"


def test_markdown_prose() -> None:
    text = md(HOSTILE)
    assert "\n" not in text
    assert "\x1b" not in text
    assert "<" not in text
    assert "|" not in text.replace("\\|", "")
    assert "\\](javascript" in text
    assert "\\`x\\`" in text
    assert "@team" not in text
    assert "#12" not in text
    assert md("- a") == "\\- a"
    assert md("1. a") == "1\\. a"
    assert md("1.7e7 / 5 (x)") == "1.7e7 / 5 (x)"
    assert md("a_b _c_ __d__") == "a_b \\_c\\_ \\_\\_d\\_\\_"
    assert md("&lt;") == "&amp;lt;"


def test_markdown_code_cannot_be_left() -> None:
    assert md_code("a`b") == "``a`b``"
    assert md_code("`a") == "`` `a ``"
    assert md_code("a|b", table=True) == "`a\\|b`"
    assert md_code("a\nb") == "`a b`"
    assert md_code("") == "\u2013"
    assert md_block("x\n```\ny") == "````\nx\n```\ny\n````"
