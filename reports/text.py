"""Values and foreign text as people read them: numbers with units, and strings from records made harmless.

Everything in a record may come from a framework's error message or from a patch: nothing of it reaches a terminal, a
Markdown page or a spreadsheet unescaped. (HTML is escaped by the template engine; `clean` comes before it.)
"""

from __future__ import annotations

import math
import re
import unicodedata

MISSING, TIMES = "\u2013", "\u00d7"
# Cc control, Cf format (bidi overrides, zero width), Cs surrogates, Zl and Zp line separators: each can hide text.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def clean(text: str | None, newlines: bool = False) -> str:
    r"""`text` with every control and invisible character spelled out (``\x1b``); newlines stay, or become spaces."""
    if not text:
        return ""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    if not newlines:
        text = re.sub(r"\s*\n\s*", " ", text.strip())
    return "".join(c if c == "\n" or unicodedata.category(c) not in _INVISIBLE else _spell(c) for c in text)


def _spell(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shorten(text: str, most: int) -> str:
    """`text` cut to at most `most` characters, with its end marked."""
    return text if len(text) <= most else text[: most - 2].rstrip() + " …"


def sentence(text: str) -> str:
    """`text` with a full stop, where it ends without one."""
    return text if not text or text[-1] in ".!?…" else f"{text}."


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return MISSING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def seconds(value: float | None) -> str:
    """Duration in the unit that suits it."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞"
    if 0 < abs(value) < 1e-3:
        return f"{number(value * 1e6)} µs"
    if 0 < abs(value) < 1:
        return f"{number(value * 1e3)} ms"
    if abs(value) < 120:
        return f"{number(value)} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(value: float | None) -> str:
    """Bytes as MiB or GiB."""
    if value is None:
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def times(value: float | None) -> str:
    """A factor, as in headroom."""
    if value is not None and 0 < value < 1e-3:
        return f"<0.001{TIMES}"
    return MISSING if value is None else f"{number(value)}{TIMES}"


def percent(change: float) -> str:
    """Relative change with its sign: 0.05 is ``+5.0%``."""
    return f"{change * 100:+.1f}%" if math.isfinite(change) else number(change)


def count(many: int, noun: str, plural: str | None = None) -> str:
    """``1 case``, ``2 cases``."""
    return f"{many} {noun if many == 1 else plural or noun + 's'}"


def md(text: str | None, most: int = 2000) -> str:
    """Foreign text as a line of Markdown prose: no markup, table cell, HTML, link, @mention or #reference survives."""
    text = shorten(clean(text), most)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~$#]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text)
    text = re.sub(r"^([-+=])|^(\d+)([.)])(?=\s|$)", r"\2\\\1\3", text)  # no list, no underline of a heading
    # GitHub links mentions, issues and addresses after rendering, whatever was escaped: only a broken word stops it.
    return re.sub(r"(@|://|#|www)(?=\S)", "\\1\u200b", text)


def md_code(text: str | None, table: bool = False) -> str:
    """Foreign text as a Markdown code span; inside a table cell, pipes need a backslash of their own."""
    text = clean(text)
    if not text:
        return MISSING
    fence = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") or text.strip(" ") == "" else ""
    return f"{fence}{pad}{text.replace('|', chr(92) + '|') if table else text}{pad}{fence}"


def md_block(text: str, language: str = "") -> str:
    """Foreign text as a fenced block that its own backticks cannot end."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{clean(text, newlines=True)}\n{fence}"


def md_table(head: list[str], rows: list[list[str]], right: frozenset[int] = frozenset()) -> str:
    """Markdown table of cells that are escaped already; columns in `right` are set flush right."""
    rule = ["--:" if i in right else "---" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
