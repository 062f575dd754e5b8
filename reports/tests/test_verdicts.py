"""Rounding or bug, as the reader sees it: every kind of verdict, in all three renderings."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from ci.records import Dormant, Finding, Guess, Measured, Record, Rung
from reports import explain, markdown
from reports.columns import BY_NAME
from reports.compare import compare
from reports.load import load, rows
from reports.summary import outcome, summarize

LOW = "handwritten:tie=tied,head=row,zero=0,matmul=tf32"
FULL = "handwritten:tie=tied,head=row,zero=0"
HOSTILE = (
    "a|b <script>alert(1)</script> [x](javascript:alert(1)) ``` @team \x1b[31m[bold]red[/bold]\n# heading {{ 7*7 }}"
)
WRONG = Measured(
    oracle="gradient",
    name="embed_tokens.weight",
    step=3,
    scope="tensor",
    limit=6.0,
    error=0.842,
    predicted=0.00205,
    sees=0.0134,
    sigmas=411.0,
    row=44,
    rows_wrong=0.41,
)
NORM = Measured(
    oracle="gradient_norm",
    name="global norm",
    step=3,
    scope="norm",
    limit=4.0,
    error=0.025,
    predicted=0.002,
    sigmas=11.7,
)
RIGHT = Measured(
    oracle="gradient",
    name="layers.0.k_proj.weight",
    step=1,
    scope="row",
    limit=12.0,
    error=0.0013,
    predicted=0.0018,
    sees=0.0194,
    sigmas=3.0,
)
FLAGGED = Finding(
    oracle="gradient", flagged=True, evidence="embed 0.84 off", error=411.0, limit=6.0, unit="sigma (tensor)", step=3
)
SWITCH = Finding(oracle="switches", flagged=True, evidence="rank 1 multiplies in tf32, the case asks for ieee")
LOST = Finding(oracle="precision", flagged=True, evidence="all logits are bfloat16 values")
GUESSES = (
    Guess(bug_class=4, name="one contribution missing from the tied gradient", why="no lookup part"),
    Guess(bug_class=8, name="reduction on a copy", why="the owner's rows are right"),
    Guess(bug_class=9, name="data-parallel reduce missing", why="never shown: the third"),
)
DORMANT = (
    Dormant(bug_class=10, reason="dp = 1"),
    Dormant(bug_class=9, reason="dp = 1"),
    Dormant(bug_class=18, reason="clipping is off"),
)


def factors(case: str, **more: str) -> dict[str, str]:
    return {"dtype": "float32"} | dict(part.split("=", 1) for part in case.partition(":")[2].split(",")) | more


def bug(record, case: str = LOW, **changes: Any) -> Record:
    """A bug at TF32 that fp32 shows too."""
    values: dict[str, Any] = {
        "factors": factors(case),
        "verdict": "bug",
        "oracle": "gradient, gradient_norm",
        "evidence": "bug at float32 (relative error 0.84, slope 0.00): no rounding",
        "findings": (FLAGGED,),
        "error": 411.0,
        "limit": 6.0,
        "headroom": 6 / 411,
        "measured": (RIGHT, NORM, WRONG),
        "escalation": (Rung(case=FULL, arithmetic="float32", verdict="bug", error=0.841, slope=-0.001),),
        "diagnosis": "embed_tokens.weight lacks the lookup's contribution on rank 1",
        "guesses": GUESSES,
        "dormant": DORMANT,
        "verdict_seconds": 0.25,
    }
    return record(case, **(values | changes))


def section(directory: Path) -> str:
    """The failing cases in Markdown."""
    text = markdown.render(summarize(load(directory)))
    return text[text.index("### ") : text.index("## All cases")].rstrip() + "\n"


def test_bug_in_markdown_word_for_word(make_run, record) -> None:
    directory = make_run("bug", [bug(record)], exit_code=1)
    assert (
        section(directory)
        == f"""\
### ❌ bug: `{LOW}`

**embed_tokens.weight lacks the lookup's contribution on rank 1.**

- looks like **class 4** (one contribution missing from the tied gradient): no lookup part
- looks like **class 8** (reduction on a copy): the owner's rows are right

No rounding: at float32 it is still there (slope 0.00; rounding has 1).

| precision | verdict there | relative error | slope | what that means |
| --- | --- | --: | --: | --- |
| tf32 | flagged | 0.842 | \u2013 | the case's own run: embed_tokens.weight is 411 sigma off, limit 6 |
| float32 | bug | 0.841 | 0.00 | the error does not shrink with the precision: no rounding |

| tensor | step | relative error | rounding gives | sigma | limit | worst row | rows wrong | error at float32 | slope |
| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |
| embed_tokens.weight | 3 | 0.842 | 0.00205 | 411 (tensor) | 6 | 44 | 41% | 0.841 | 0.00 |
| global norm | 3 | 0.025 | 0.002 | 11.7 (norm) | 4 | \u2013 | \u2013 | \u2013 | \u2013 |

> bug at float32 (relative error 0.84, slope 0.00): no rounding

flagged by gradient, gradient_norm · error / limit 411 / 6 sigma (tensor) (gradient) · 1.25 s of 20 s

- **gradient**: embed 0.84 off

```sh
tiebench run --case '{LOW}' --target 'deepspeed==0.19.8'
```

<details><summary>What this case could not have seen</summary>

Errors below 0.0194 of layers.0.k_proj.weight could not have been seen.

| tensor | check | relative error from which it is flagged | sigma | limit |
| --- | --- | --: | --: | --: |
| global norm | gradient_norm | nothing | 11.7 | 4 |
| layers.0.k_proj.weight | gradient | 0.0194 | 3 | 12 |
| embed_tokens.weight | gradient | 0.0134 | 411 | 6 |

- classes 9, 10 of bugs: dp = 1
- class 18 of bugs: clipping is off

</details>
"""
    )


def test_bug_in_html_and_terminal(make_run, record, page, terminal) -> None:
    directory = make_run("bug", [bug(record)], exit_code=1)
    shown, printed = page(directory), " ".join(terminal(directory, 400).split())
    for words in (
        "lacks the lookup's contribution on rank 1",
        "No rounding: at float32 it is still there (slope 0.00; rounding has 1)",
        "verdicts took 250 ms, 20% of the wall time",
    ):
        assert shown.has(words)
        assert words in printed
    assert (
        "looks like class 4 (one contribution missing from the tied gradient); class 8 (reduction on a copy)" in printed
    )
    assert "tf32 0.842 (flagged) → float32 0.841 (bug, slope 0.00)" in printed
    assert (
        "embed_tokens.weight is 411 sigma off, limit 6; relative error 0.842, rounding gives 0.00205 (step 3)"
        in printed
    )
    for words in ("class 8 (reduction on a copy)", "classes 9, 10 of bugs: dp = 1", "411 (tensor)"):
        assert shown.has(words)
    assert not shown.has("never shown")
    assert "never shown" not in printed


def test_precision_bug(make_run, record, page, terminal) -> None:
    rung = Rung(case=FULL + ",dtype=float64", arithmetic="float64", verdict="rounding", error=5e-16, slope=1.2)
    lost = bug(record, FULL, verdict="bug: precision", escalation=(rung,), diagnosis="", guesses=())
    directory = make_run("precision", [lost], exit_code=1)
    summary = summarize(load(directory))
    assert (summary.state, dict(summary.counts)) == ("red", {"bug: precision": 1})
    assert summary.next_step.startswith("find where precision is lost (flagged by gradient, gradient_norm)")
    why = "Precision is lost where it should not be: something is computed or kept in a lower one than asked"
    text = section(directory)
    assert text.startswith(
        f"### ❌ bug: precision: `{FULL}`\n\n{why}; at float64 the same program is right.\n\n> bug at"
    )
    assert "| float64 | rounding | 5e-16 | 1.20 | the error shrinks with the precision, as rounding does |" in text
    assert page(directory).has(why)
    assert why in " ".join(terminal(directory).split())


def test_rounding_that_only_a_higher_precision_shows(make_run, record, page, terminal) -> None:
    rung = Rung(case=FULL, arithmetic="float32", verdict="rounding", error=3e-7, slope=0.9)
    green = bug(record, verdict="rounding", escalation=(rung,), diagnosis="", guesses=())
    directory = make_run("cleared", [green, record(FULL)])
    summary = summarize(load(directory))
    assert (summary.state, summary.exit_code) == ("green", 0)
    text = markdown.render(summary)
    assert "## 1 case beyond a limit and rounding all the same" in text
    assert "Rounding: beyond a limit at tf32, within it at float32." in text
    assert "| float32 | rounding | 3e-7 | 0.90 | the error shrinks with the precision, as rounding does |" in text
    assert f"| `{LOW}` | ✅ rounding at float32 | 411 / 6 sigma (tensor) |" in text
    for shown in (page(directory), terminal(directory, 300)):
        has = shown.has if hasattr(shown, "has") else shown.__contains__
        assert has("Rounding: beyond a limit at tf32, within it at float32")


@pytest.mark.parametrize("escalated", [True, False])
def test_another_environment_is_not_as_expected_although_numbers_are(
    make_run, record, page, terminal, escalated: bool
) -> None:
    rung = Rung(case=FULL, arithmetic="float64", verdict="rounding", error=5e-16, slope=1.4)
    changes: dict[str, Any] = {"verdict": "rounding", "oracle": "switches", "guesses": ()}
    changes |= {"findings": (SWITCH, FLAGGED) if escalated else (SWITCH,), "escalation": (rung,) if escalated else ()}
    changes |= {} if escalated else {"error": 1.0, "headroom": 6.0, "measured": (RIGHT,)}
    directory = make_run("switches", [bug(record, FULL, **changes)], exit_code=1)
    summary = summarize(load(directory))
    assert (summary.state, summary.exit_code) == ("red", 1)
    assert outcome(summary.failing[0]) == "wrong environment"
    assert summary.next_step == "set the environment as the case asks, then run the first case again"
    gone = " (beyond their limit at float32, within it at float64)" if escalated else ""
    said = f"The numbers are rounding{gone}, but the environment is not what the case asks for: {SWITCH.evidence}"
    assert f"### ⚠️ wrong environment: `{FULL}`\n\n**{said}.**\n" in section(directory)
    assert page(directory).has(said)
    assert said in terminal(directory, 400)


def test_switches_do_not_excuse_what_else_flags(make_run, record) -> None:
    odd = bug(record, FULL, verdict="rounding", findings=(SWITCH, FLAGGED), escalation=())
    assert outcome(summarize(load(make_run("odd", [odd], exit_code=1))).failing[0]) == "contradictory"
    tie = Finding(oracle="tie", flagged=True, evidence="two Parameters")
    rung = Rung(case=FULL, arithmetic="float64", verdict="rounding", error=5e-16, slope=1.4)
    odd = bug(record, FULL, verdict="rounding", findings=(SWITCH, tie), escalation=(rung,))
    assert outcome(summarize(load(make_run("tie", [odd], exit_code=1))).failing[0]) == "contradictory"


def test_the_environment_alone_makes_a_record_not_as_expected(record, monkeypatch) -> None:
    monkeypatch.setattr(explain, "expected", lambda record: True)  # whatever the record log makes of it
    assert explain.as_expected(record(FULL))
    assert not explain.as_expected(record(FULL, findings=(SWITCH,)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"escalation": ()}, "No rounding: embed_tokens.weight is 68.5\u00d7 over its limit at tf32"),
        (
            {"escalation": (), "measured": (Measured(oracle="g", name="w", step=1, scope="tensor", limit=6.0),)},
            "No rounding: w is not finite",
        ),
        (
            {"escalation": (), "findings": (FLAGGED, Finding(oracle="tie", flagged=True, evidence=""))},
            "No rounding: tie asks yes or no, whatever the precision",
        ),
        (
            {"escalation": (Rung(case=LOW + ",seed=1", arithmetic="tf32", verdict="bug"),)},
            "No rounding: it is flagged with other data and weights too",
        ),
        (
            {"verdict": "inconclusive", "escalation": (Rung(case=FULL, arithmetic="float32", verdict="failed"),)},
            "Not decided: the higher precisions do not tell rounding from a bug either",
        ),
        (
            {"verdict": "bug: precision", "findings": (LOST,), "escalation": ()},
            "Precision is lost where it should not be: all logits are bfloat16 values",
        ),
        ({"verdict": "inconclusive", "escalation": ()}, ""),
        ({"verdict": "crash", "escalation": ()}, ""),
        ({"status": "timeout", "verdict": "hang", "escalation": ()}, ""),
    ],
)
def test_why(record, changes: dict[str, Any], said: str) -> None:
    assert explain.because(bug(record, **changes)) == said


@pytest.mark.parametrize(
    ("rung", "reading"),
    [
        ({"verdict": "rounding", "slope": 0.74}, "the error shrinks with the precision, as rounding does"),
        ({"verdict": "rounding", "slope": 0.73}, "the error shrinks more slowly than rounding would"),
        ({"verdict": "bug", "slope": 0.2}, "the error does not shrink with the precision: no rounding"),
        ({"verdict": "exact", "error": 0.0}, "no error is left"),
        ({"verdict": "failed", "note": "rank 1 died"}, "did not end: rank 1 died"),
        ({"verdict": "bug", "arithmetic": "tf32"}, "other data and weights: flagged again"),
        ({"verdict": "rounding", "arithmetic": "tf32"}, "other data and weights: not flagged"),
    ],
)
def test_reading_of_a_rung(record, rung: dict[str, Any], reading: str) -> None:
    escalation = (Rung(**({"case": FULL, "arithmetic": "float32"} | rung)),)
    assert explain.steps(bug(record, escalation=escalation))[1].reading == reading


def test_limit_of_the_slope_is_that_of_the_verdict() -> None:
    from suites.limits import SLOPE

    assert explain.SLOPE == SLOPE


def test_equal_failures_are_one_paragraph(make_run, record, page, terminal) -> None:
    cases = [f"{LOW},hidden={size}" for size in range(30, 90)]
    many = [
        bug(record, case, diagnosis=f"layers.{n}.weight lacks {n}% of rank {n % 2}", measured=(WRONG,) * (n + 1))
        for n, case in enumerate(cases)
    ]
    other = bug(record, LOW + ",hidden=99", diagnosis="the global norm counts a weight twice")
    directory = make_run("many", [*many, other], exit_code=1)
    summary = summarize(load(directory))
    assert [len(group.records) for group in summary.groups] == [60, 1]
    text = markdown.render(summary)
    assert "## 61 cases not as expected, of 2 kinds\n" in text
    assert text.count("### ❌ bug") == 2
    assert f"### ❌ bug: `{cases[0]}` and 59 cases alike" in text
    assert "<details><summary>The same words, other numbers: 59 cases</summary>" in text
    shown, printed = page(directory), terminal(directory, 200)
    assert sum(attributes.get("class") == "failing bad" for _, attributes in shown.tags) == 2
    assert shown.has("The same words, other numbers: 59 cases")
    assert shown.has("61 cases not as expected, of 2 kinds")
    assert "59 cases alike" in printed
    assert printed.count("No rounding:") == 2
    for case in cases:  # none is lost
        assert f"tiebench run --case '{case}'" in text
        assert shown.has(case)


@pytest.mark.parametrize(
    "changes",
    [
        {"diagnosis": "the head lacks the lookup's contribution"},
        {"verdict": "inconclusive"},
        {"oracle": "gradient"},
        {"fault": "other"},
        {"guesses": GUESSES[1:]},
        {"status": "timeout"},
    ],
)
def test_different_failures_stay_apart(record, changes: dict[str, Any]) -> None:
    assert len(explain.grouped([bug(record), bug(record, LOW + ",seed=1", **changes)])) == 2


def test_contributions_tell_failures_apart_without_a_diagnosis(record) -> None:
    def held(lookup: str, case: str) -> Record:
        text = f"embed.weight step 1 (row 30 sigma); embed.weight holds {lookup} of the lookup's contribution"
        finding = Finding(oracle="gradient", flagged=True, evidence=text, error=30.0, limit=12.0)
        return bug(record, case, diagnosis="", findings=(finding,))

    cases = [held("0.000", LOW), held("-0.011", LOW + ",seed=1"), held("2.000", LOW + ",seed=2")]
    assert [len(group.records) for group in explain.grouped(cases)] == [2, 1]


def test_words_without_names_and_numbers() -> None:
    text = (
        "tie broken at handwritten:tie=tied,head=row: layers.0.k_proj.weight step 3 (tensor 1.2e+06 sigma) at bfloat16"
    )
    assert explain.template(text) == "tie broken at <case> <name> step <number> (<scope> <number> sigma) at <precision>"


def test_green_cases_have_a_table_of_headroom_and_visibility(make_run, record, page) -> None:
    green = [record(FULL, factors=factors(FULL), measured=(RIGHT,), dormant=DORMANT), record(LOW)]
    directory = make_run("green", green)
    text = markdown.render(summarize(load(directory)))
    assert "<details><summary>Headroom and visibility of 1 green case</summary>" in text
    row = f"| `{FULL}` | float32 | 4\u00d7 | layers.0.k_proj.weight | 0.0194 | layers.0.k_proj.weight |"
    assert row in text
    assert "- relative errors at float32: gradient below 0.0194 (layers.0.k_proj.weight)" in text
    assert "of bugs in any case" not in text  # the other case may have shown them
    assert page(directory).has("Headroom and visibility of 1 green case")


def test_classes_that_no_green_case_could_show(make_run, record) -> None:
    both = [record(FULL, dormant=DORMANT), record(LOW, dormant=DORMANT[:1])]
    blind = summarize(load(make_run("dormant", both))).blind
    assert "class 10 of bugs in any case: dp = 1" in blind
    assert not any("18" in line for line in blind)


def test_columns(make_run, record) -> None:
    failed, green = rows(load(make_run("columns", [bug(record), record(FULL)], exit_code=1)).run)
    assert failed["verdict_seconds"] == 0.25
    assert failed["visibility"] == 0.0194
    assert failed["slope"] == -0.001
    assert failed["escalation"] == "float32: bug"
    assert failed["guesses"].startswith("4 one contribution missing from the tied gradient; 8 reduction")
    assert failed["diagnosis"].startswith("embed_tokens.weight lacks")
    for name in ("verdict_seconds", "visibility", "slope", "escalation", "guesses", "diagnosis"):
        assert green[name] is None
    assert (BY_NAME["verdict_seconds"].unit, BY_NAME["verdict_seconds"].direction) == ("s", "lower")
    assert (BY_NAME["visibility"].unit, BY_NAME["visibility"].direction) == ("relative", "lower")


def test_a_gradient_that_shows_nothing_is_infinitely_dull(record) -> None:
    nothing = Measured(oracle="gradient", name="pad", step=1, scope="tensor", limit=6.0, sigmas=0.0, sees=None)
    found = record(FULL, measured=(RIGHT, nothing))
    assert explain.visibility(found) == math.inf
    assert explain.blindness(found) == "Nothing could have been seen in pad"


def test_fields_that_are_missing_or_not_finite_break_nothing(make_run, record, page, terminal) -> None:
    bare = Measured(oracle="gradient", name="w", step=0, scope="?", limit=0.0)
    odd = [
        bug(record, LOW, measured=(bare,), escalation=(Rung(case="", arithmetic="", verdict=""),), factors={}),
        bug(record, LOW + ",seed=1", measured=(), findings=(), diagnosis="", guesses=(), dormant=(), evidence=""),
        bug(
            record,
            LOW + ",seed=2",
            guesses=(Guess(bug_class=0, name="", why=""),),
            verdict_seconds=None,
            wall_seconds=None,
        ),
        bug(
            record, LOW + ",seed=3", verdict="bug: precision", measured=(bare,), escalation=(), oracle=None, limit=None
        ),
        record(FULL, measured=(bare,), dormant=(Dormant(bug_class=1, reason=""),)),
    ]
    directory = make_run("odd", odd, exit_code=1)
    text = markdown.render(summarize(load(directory)))
    assert "| w | 0 | not finite | \u2013 | not finite (?) | 0 | 0 | 0% |" in text
    assert page(directory).has("w is not finite")
    for width in (40, 80, 200):
        assert "not finite" in terminal(directory, width)


def test_records_of_schema_1_are_read(make_run, record, page, terminal) -> None:
    old = record(FULL, verdict="bug", oracle="gradient", evidence="gradient off by 0.97", findings=(FLAGGED,))
    directory = make_run("old", [old], exit_code=1, schema=1)
    text = section(directory)
    assert "gradient off by 0.97" in text
    assert "could not have seen" not in text
    summary = summarize(load(directory))
    assert summary.verdict_cost == ""
    assert page(directory).has("gradient off by 0.97")
    assert "verdicts took" not in terminal(directory)


def test_cost_of_the_verdict_says_what_it_is_of(make_run, record) -> None:
    told = [record(FULL, verdict_seconds=0.5, wall_seconds=2.0), record(LOW, wall_seconds=2.0)]
    assert summarize(load(make_run("part", told))).verdict_cost == (
        "verdicts took 500 ms, 25% of the wall time (1 of 2 cases tell)"
    )


def hostile(make_run, record) -> Path:
    measured = Measured(oracle=HOSTILE, name=HOSTILE, step=1, scope=HOSTILE, limit=6.0, sigmas=60.0, error=1.0)
    gradient = Measured(oracle="gradient", name=HOSTILE, step=1, scope="tensor", limit=6.0, sigmas=1.0, sees=0.1)
    rung = Rung(case=HOSTILE, arithmetic=HOSTILE, verdict=HOSTILE, error=1.0, slope=0.1, note=HOSTILE)
    changes = {
        "diagnosis": HOSTILE,
        "guesses": (Guess(bug_class=4, name=HOSTILE, why=HOSTILE),),
        "dormant": (Dormant(bug_class=4, reason=HOSTILE),),
        "measured": (measured, gradient),
        "factors": {"matmul": HOSTILE},
    }
    switch = Finding(oracle="switches", flagged=True, evidence=HOSTILE)
    green = {"verdict": "rounding", "diagnosis": "", "findings": (), "oracle": None}
    cleared = Rung(case=HOSTILE, arithmetic=HOSTILE, verdict="rounding", note=HOSTILE)
    told = [
        bug(record, LOW, escalation=(rung,), **changes),
        bug(record, LOW + ",seed=1", escalation=(rung,), **changes),
        bug(record, FULL, escalation=(cleared,), **(changes | green)),
        bug(record, FULL + ",seed=1", escalation=(cleared,), **(changes | green | {"findings": (switch,)})),
    ]
    return make_run("hostile", told, exit_code=1)


def test_hostile_strings_in_every_new_field(make_run, record, page, terminal) -> None:
    directory = hostile(make_run, record)
    summary = summarize(load(directory))
    assert dict(summary.counts) == {"bug": 2, "wrong environment": 1, "rounding": 1}
    text = markdown.render(summary)
    assert "\x1b" not in text
    prose = re.sub(r"^(`{3,})[a-z]*\n.*?\n\1$", "", text, flags=re.S | re.M)
    prose = re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", prose)
    assert "alert" in prose
    for words in ("<script", "[x](", "@team"):
        assert words not in prose
    assert not re.search(r"^# heading", prose, re.M)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(tables) >= 6
    for table in tables:  # no cell is torn apart
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    shown = page(directory)
    assert [tag for tag, _ in shown.tags].count("script") == 1
    assert not any("\x1b" in part for part in shown.text)
    assert shown.has("{{ 7*7 }}")
    printed = terminal(directory, 300)
    assert "\x1b" not in printed
    assert "[bold]red[/bold]" in printed


# Comparison


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("rounding", "bug: precision", 1),
        ("bug", "bug: precision", 1),
        ("bug: precision", "bug", 1),
        ("bug: precision", "bug: precision", 0),
        ("bug: precision", "rounding", 0),
    ],
)
def test_a_verdict_that_changes_is_news(make_run, record, before: str, after: str, code: int) -> None:
    def one(verdict: str) -> Record:
        return bug(record, verdict=verdict) if verdict != "rounding" else record(LOW)

    base = make_run("base", [one(before), record(FULL)], exit_code=1 if before != "rounding" else 0)
    result = compare(base, make_run("head", [one(after), record(FULL)], exit_code=1 if after != "rounding" else 0))
    assert result.exit_code == code
    if code:
        assert (
            f"| `{LOW}` | {before} | {after} | **gradient, gradient_norm**: embed_tokens.weight lacks"
            in result.markdown
        )
        assert "Looks like class 4 (one contribution" in result.markdown
        how = "newly not as expected" if before == "rounding" else "not as expected in another way than in the base"
        assert f"1 case {how}" in result.headline
    elif after == "rounding":
        assert "1 fixed" in result.headline
    else:
        assert "1 still failing as in the base" in result.headline


def test_another_environment_is_news(make_run, record) -> None:
    head = make_run("head", [record(FULL, findings=(SWITCH,), oracle="switches"), record(LOW)], exit_code=1)
    result = compare(make_run("base", [record(FULL), record(LOW)]), head)
    assert result.exit_code == 1
    assert f"| `{FULL}` | rounding | wrong environment |" in result.markdown


def test_equal_failures_are_one_row_of_the_comment(make_run, record) -> None:
    cases = [f"{LOW},seed={seed}" for seed in range(60)]
    base = make_run("base", [record(case) for case in [*cases, FULL]])
    head = make_run("head", [*(bug(record, case) for case in cases), record(FULL)], exit_code=1)
    text = compare(base, head).markdown
    assert f"| `{cases[0]}` and 59 alike | rounding | bug |" in text
    assert "<details><summary>59 cases like one of these</summary>" in text
    assert f"| `{cases[59]}` | rounding | bug | `{cases[0]}` |" in text
    assert text.count("lacks the lookup's contribution") == 1
