"""The comparison: the comment's exact text, and the gate, which must fail closed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ci.records import EVENTS
from reports.compare import MARKER, MOST_CHARACTERS, compare

A = "handwritten:tie=tied,head=vocab,zero=0"
B = "deepspeed:tie=tied,head=row,zero=0"
C = "deepspeed:tie=untied,head=row,zero=2"
BUG = {"verdict": "bug", "oracle": "tie", "evidence": "two Parameters"}


def steps(mean: float, n: int = 13, seed: int = 0, spread: float = 0.01) -> tuple[float, ...]:
    """Step times, the first one slow."""
    source = random.Random(seed)
    return (10 * mean, *(mean * source.gauss(1, spread) for _ in range(n - 1)))


def test_equal_runs_whole_comment(make_run, record) -> None:
    base = make_run("base", [record(A), record(B)])
    head = make_run("head", [record(A), record(B)])
    result = compare(base, head)
    assert result.exit_code == 0
    assert (
        result.markdown
        == f"""\
{MARKER}

✅ **GREEN: nothing new fails in 2 cases, insufficient data on step times.** Next: nothing to do.

Plan `smoke`: base `deepspeed==0.19.8` (run `run-base`), head `deepspeed==0.19.8` (run `run-head`)

<details><summary>Step times: 2 cases with insufficient data (2 samples a side, 6 needed)</summary>

| case | base | head | change | 99% interval, n | noise floor | verdict |
| --- | --- | --- | --- | --- | --- | --- |
| `{A}` | 20.5 ms | 20.5 ms | +0.0% | n = 2 | \u2013 | insufficient data |
| `{B}` | 20.5 ms | 20.5 ms | +0.0% | n = 2 | \u2013 | insufficient data |

</details>

<sub>Noise between runs was not measured: 25% is assumed. Further runs of the base, on this machine, measure it.</sub>

Environments are equal.

<details><summary>2 cases unchanged</summary>

| case | head |
| --- | --- |
| `{A}` | rounding, 0.5 / 5 sigma |
| `{B}` | rounding, 0.5 / 5 sigma |

</details>

Raw data: `{base / EVENTS}`, `{head / EVENTS}`. The head's run and this comparison again:

```sh
tiebench run --plan smoke
tiebench compare {base} {head}
```
"""
    )


def test_order_of_the_comment(make_run, record) -> None:
    base = make_run("base", [record(A, step_seconds=steps(0.02)), record(B), record(C, error=0.1)])
    head = make_run(
        "head",
        [record(A, step_seconds=steps(0.04, seed=1)), record(B, **BUG), record(C, error=1.0)],
        exit_code=1,
        environment={"python": "3.12.1"},
    )
    result = compare(base, head)
    assert result.exit_code == 1
    text = result.markdown
    assert text.startswith(f"{MARKER}\n\n❌ **RED: 1 case newly not as expected; 1 regression of the step time.**")
    order = [
        "### Failed, timed out, lost, skipped or missing",
        f"| `{B}` | rounding | bug | **tie**: two Parameters |",
        f"tiebench run --case '{B}' --target 'deepspeed==0.19.8'",
        "### Numerics that changed",
        f"| `{C}` | rounding, 0.1 / 5 sigma | rounding, 1 / 5 sigma | 10\u00d7 |",
        "### Slower",
        f"| `{A}` | 19",
        "| regression |",
        "### Difference of the environments",
        "| `python` | `3.11.7` | `3.12.1` |",
        "| `packages.torch` | `2.13.0` | \u2013 |",
        "Raw data",
    ]
    places = [text.find(part) for part in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)


def gate(make_run, base_records, head_records, **head) -> int:
    return compare(make_run("base", base_records), make_run("head", head_records, **head)).exit_code


def test_gate_is_red_for_a_case_that_went_missing(make_run, record) -> None:
    base, head = (
        make_run("base", [record(A), record(B)]),
        make_run("head", [record(A)], options="--target deepspeed==0.19.8"),
    )
    result = compare(base, head)
    assert result.exit_code == 1
    assert f"| `{B}` | rounding | \u2013 | the head has no such case |" in result.markdown
    assert f"tiebench run --case {B} --target deepspeed==0.19.8" in result.markdown


@pytest.mark.parametrize(
    "change",
    [
        BUG,
        {"verdict": "crash"},
        {"verdict": "refused"},
        {"verdict": "inconclusive"},
        {"verdict": None},
        {"status": "timeout", "verdict": "hang"},
        {"status": "skipped", "verdict": None},
        {"status": "lost", "verdict": None},
        {"status": "not_run", "verdict": None},
    ],
)
def test_gate_is_red_for_every_new_failure(make_run, record, change) -> None:
    assert gate(make_run, [record(A), record(B)], [record(A), record(B, **change)]) == 1


def test_gate_is_green_for_the_same_failure_and_red_for_another(make_run, record) -> None:
    base = make_run("base", [record(A), record(B, **BUG)], exit_code=1)
    same = compare(base, make_run("same", [record(A), record(B, **BUG)], exit_code=1))
    assert same.exit_code == 0
    assert "1 still failing as in the base" in same.headline
    other = compare(base, make_run("other", [record(A), record(B, **(BUG | {"oracle": "replicas"}))], exit_code=1))
    assert other.exit_code == 1


def test_lost_in_both_is_still_red(make_run, record) -> None:
    lost = record(B, status="lost", verdict=None)
    assert gate(make_run, [record(A), lost], [record(A), lost]) == 1


def test_new_case_must_be_green(make_run, record) -> None:
    assert gate(make_run, [record(A)], [record(A), record(B)]) == 0
    base = make_run("base2", [record(A)])
    assert compare(base, make_run("head2", [record(A), record(B, **BUG)], exit_code=1)).exit_code == 1


def test_fixed_case_is_said(make_run, record) -> None:
    base, head = make_run("base", [record(A), record(B, **BUG)]), make_run("head", [record(A), record(B)])
    result = compare(base, head)
    assert result.exit_code == 0
    assert "1 fixed" in result.headline
    assert f"| `{B}` | bug, 0.5 / 5 sigma | rounding, 0.5 / 5 sigma | fixed |" in result.markdown


def test_exact_to_rounding_is_a_change_of_numerics(make_run, record) -> None:
    base, head = make_run("base", [record(A, verdict="exact")]), make_run("head", [record(A)])
    assert "| exact → rounding |" in compare(base, head).markdown


def test_small_errors_may_wander(make_run, record) -> None:
    base, head = make_run("base", [record(A, error=0.001)]), make_run("head", [record(A, error=0.01)])
    assert "Numerics that changed" not in compare(base, head).markdown


@pytest.mark.parametrize(
    "how",
    [
        {"end": None},
        {"end": "budget", "exit_code": 1},
        {"end": "interrupted", "exit_code": 1},
        {"end": "error", "exit_code": 1},
        {"exit_code": 1},
        {"tail": b'{"eve'},
        {"tail": b"nonsense\n"},
        {"plan": [A, B]},
    ],
)
def test_gate_is_red_for_an_incomplete_head(make_run, record, how) -> None:
    assert gate(make_run, [record(A)], [record(A)], **how) == 1


def test_gate_is_red_for_empty_runs(make_run, record) -> None:
    full, empty, other = make_run("full", [record(A)]), make_run("empty"), make_run("other")
    assert compare(full, empty).exit_code == 1
    assert compare(empty, full).exit_code == 1
    assert compare(empty, other).exit_code == 1


def test_unreadable_directory_is_never_green(make_run, record, tmp_path: Path) -> None:
    run = make_run("run", [record(A)])
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / EVENTS).write_bytes(b"hello\n")
    for base, head in [(run, tmp_path / "no"), (tmp_path / "no", run), (run, foreign), (foreign, run)]:
        result = compare(base, head)
        assert result.exit_code == 2
        assert result.markdown.startswith(f"{MARKER}\n\n⚠️ **NOT COMPARED: the ")
    assert compare(run, make_run("head", [record(A)]), [tmp_path / "no"]).exit_code == 2


def test_a_run_is_not_compared_with_itself(make_run, record) -> None:
    run = make_run("run", [record(A)])
    assert compare(run, run).exit_code == 2
    assert compare(run, make_run("copy", [record(A)], run_id="run-run")).exit_code == 2
    later = make_run("later", [record(A)], run_id="run-run", started_at="2026-01-02T00:00:00+00:00")
    assert compare(run, later).exit_code == 0


def test_gate_is_red_when_nothing_is_green_even_if_the_base_is_as_bad(make_run, record) -> None:
    base, head = (make_run(n, [record(A, verdict="crash"), record(B, verdict="crash")], exit_code=1) for n in "bh")
    result = compare(base, head)
    assert result.exit_code == 1
    assert "nothing was measured" in result.headline


def speed_of(make_run, record, base, head, noise=()):
    runs = [make_run(f"r{i}", [record(A, step_seconds=s)]) for i, s in enumerate((base, head, *noise))]
    return compare(runs[0], runs[1], runs[2:])


def test_twice_as_slow_is_a_regression(make_run, record) -> None:
    result = speed_of(make_run, record, steps(0.02), steps(0.04, seed=1))
    assert result.exit_code == 1
    assert "### Slower" in result.markdown


def test_faster_is_an_improvement(make_run, record) -> None:
    result = speed_of(make_run, record, steps(0.04), steps(0.02, seed=1))
    assert result.exit_code == 0
    assert "### Faster" in result.markdown
    assert "### Slower" not in result.markdown


def test_few_samples_are_insufficient_data(make_run, record) -> None:
    result = speed_of(make_run, record, steps(0.02, n=6), steps(0.2, n=6, seed=1))
    assert result.exit_code == 0
    assert "| insufficient data |" in result.markdown
    assert "### Slower" not in result.markdown


def test_less_than_a_millisecond_is_no_regression(make_run, record) -> None:
    assert speed_of(make_run, record, steps(0.0005), steps(0.001, seed=1)).exit_code == 0


def test_noise_within_a_run_hides_a_change(make_run, record) -> None:
    result = speed_of(make_run, record, steps(0.02, spread=0.6), steps(0.028, seed=1, spread=0.6))
    assert result.exit_code == 0
    assert "| within noise |" in result.markdown


def test_runs_of_the_base_set_the_noise_between_runs(make_run, record) -> None:
    base, head = steps(0.02, n=30), steps(0.023, n=30, seed=1)
    assert speed_of(make_run, record, base, head).exit_code == 0  # 15 % against 25 % assumed


def test_quiet_runs_of_the_base_show_a_small_regression(make_run, record) -> None:
    base, head = steps(0.02, n=30), steps(0.023, n=30, seed=1)
    assert speed_of(make_run, record, base, head, [steps(0.0201, n=30, seed=2)]).exit_code == 1


def test_loud_runs_of_the_base_hide_a_large_change(make_run, record) -> None:
    base, head = steps(0.02, n=30), steps(0.03, n=30, seed=1)
    assert speed_of(make_run, record, base, head, [steps(0.034, n=30, seed=2)]).exit_code == 0


def test_step_times_that_are_no_times_are_left_out(make_run, record) -> None:
    bad = (0.2, 0.0, -1.0, *steps(0.02)[1:6])
    assert "n = 12, 5 |" in speed_of(make_run, record, steps(0.02), bad).markdown


def test_many_short_cases_together_need_runs_of_the_base(make_run, record) -> None:
    names = [f"deepspeed:tie=tied,head=row,zero=0,seed={i}" for i in range(8)]

    def run(name: str, mean: float, seed: int) -> Path:
        return make_run(name, [record(c, step_seconds=steps(mean, n=3, seed=seed + i)) for i, c in enumerate(names)])

    base, head, again = run("b", 0.02, 0), run("h", 0.03, 100), run("a", 0.0202, 200)
    assert compare(base, head).exit_code == 0
    result = compare(base, head, [again])
    assert result.exit_code == 1
    assert "| all 8 cases of deepspeed |" in result.markdown[result.markdown.index("### Slower") :]


def test_the_comment_is_the_same_each_time(make_run, record) -> None:
    base = make_run("base", [record(A, step_seconds=steps(0.02))])
    head = make_run("head", [record(A, step_seconds=steps(0.03, seed=1))])
    assert compare(base, head).markdown == compare(base, head).markdown


def test_hostile_strings(make_run, record) -> None:
    hostile = "a|b <script>x</script> [x](javascript:y) @team \x1b[31m\n# head"
    base = make_run("base", [record(A)])
    bad = record(A, verdict="bug", oracle=hostile, evidence=hostile)
    text = compare(base, make_run("head", [bad], exit_code=1)).markdown
    assert "\x1b" not in text
    assert "<script" not in text
    assert "@team" not in text
    assert "\n# head" not in text
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{A}` | rounding | bug")]
    assert row.replace("\\|", "").count("|") == 5


def test_long_comment_is_cut_to_what_github_takes(make_run, record) -> None:
    names = [f"deepspeed:tie=tied,head=row,zero=0,seed={i}" for i in range(150)]
    base = make_run("base", [record(c) for c in names])
    head = make_run("head", [record(c, **(BUG | {"evidence": "x" * 900})) for c in names], exit_code=1)
    result = compare(base, head)
    assert len(result.markdown.encode()) <= MOST_CHARACTERS
    assert "150 cases newly not as expected" in result.headline
    assert "more" in result.markdown
    assert result.exit_code == 1


def test_step_times_that_say_nothing_take_few_lines(make_run, record) -> None:
    cases = [f"deepspeed:tie=tied,head=row,zero=0,seed={seed}" for seed in range(40)]
    sides = [make_run(name, [record(case) for case in cases]) for name in ("base", "head")]
    text = compare(*sides).markdown
    table = text[text.index("Step times") :]
    table = table[: table.index("</details>")]
    assert "all 40 cases of deepspeed" in table
    assert table.count("| `deepspeed:") == 3
    assert "and 37 more" in table


def test_an_uncaught_fault_is_a_new_failure(make_run, record) -> None:
    base = make_run("base", [record(A)])
    head = make_run("head", [record(A, fault="copied_tie")])
    result = compare(base, head)
    assert result.exit_code == 1
    assert "fault not caught" in result.markdown
