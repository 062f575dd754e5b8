"""Summary and its three renderings over every kind of run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci.records import EVENTS, Finding, LogError
from reports import html, markdown
from reports.load import load
from reports.summary import outcome, summarize
from reports.write import write_report

A = "handwritten:tie=tied,head=vocab,zero=0"
B = "deepspeed:tie=tied,head=row,zero=0"
C = "deepspeed:tie=tied,head=row,zero=2"
D = "deepspeed:tie=untied,head=row,zero=2"
HOSTILE = (
    "a|b <script>alert(1)</script> [x](javascript:alert(1)) ``` @team \x1b[31m[bold]red[/bold]\n# heading {{ 7*7 }}"
)


def test_green(make_run, record, page, terminal) -> None:
    directory = make_run("green", [record(A), record(B, verdict="exact")])
    summary = write_report(directory)
    assert summary.exit_code == 0
    assert summary.state == "green"
    text = (directory / "report.md").read_text()
    assert text.splitlines()[0] == (
        "✅ **GREEN: all 2 cases are as expected (1 rounding, 1 exact).** Next: nothing to do."
    )
    assert f"| `{A}` | ✅ rounding | 0.5 / 5 sigma | 10× | 20 ms | 1,600 | 400 MiB | 1.25 s of 20 s | \u2013 |" in text  # noqa: RUF001
    assert "60 s of 2 min 00 s budget (50%)" in text
    assert "not as expected" not in text
    assert "`packages.torch` | `2.13.0`" in text
    shown = page(directory)
    assert shown.has("GREEN: all 2 cases are as expected")
    assert shown.has("All 2 cases")
    assert "GREEN: all 2 cases" in terminal(directory)


def test_bug_comes_with_oracle_evidence_command_and_pattern(make_run, record, page, terminal) -> None:
    findings = (Finding(oracle="tie", flagged=True, evidence="two Parameters after 'sharded'"),)
    bug = {"verdict": "bug", "oracle": "tie, gradient", "evidence": "gradient off by 0.97", "findings": findings}
    directory = make_run("bug", [record(A), record(B, **bug), record(C, **bug), record(D)], exit_code=1)
    summary = write_report(directory)
    assert summary.exit_code == 1
    assert summary.pattern == "tie=tied, head=row"
    text = (directory / "report.md").read_text()
    first, _, rest = text.partition("\n")
    assert first == (
        "❌ **RED: 2 of 4 cases not as expected (2 bug, 2 rounding)"
        ": all have tie=tied, head=row, no green case does.** "
        "Next: read the evidence (flagged by tie, gradient), then run the first case alone."
    )
    command = f"tiebench run --case '{B}' --target 'deepspeed==0.19.8'"
    assert rest.lstrip().startswith(f"```sh\n{command}\n```")
    section = text[text.index("### ❌ bug: `" + B) : text.index("## All cases")]
    assert f"### ❌ bug: `{B}` and 1 case alike\n\nNo rounding: tie asks yes or no, whatever the precision." in section
    assert "flagged by tie, gradient" in section
    assert "> gradient off by 0.97" in section
    assert "- **tie**: two Parameters after 'sharded'" in section
    assert section.count(command) == 1
    shown, printed = page(directory), terminal(directory)
    for words in ("two Parameters after 'sharded'", "gradient off by 0.97", command):
        assert shown.has(words)
    assert "gradient off by 0.97" in printed
    assert command in printed


def test_crash_hang_refused_skipped_in_order_of_severity(make_run, record, page) -> None:
    nothing = {"error": None, "limit": None, "headroom": None, "findings": ()}
    records = [
        record(A, verdict="refused", evidence="NotImplementedError: tied row", **nothing),
        record(B, status="timeout", verdict="hang", evidence="rank 1 left", stacks="Thread 1\n  all_reduce", **nothing),
        record(C, verdict="crash", evidence="RuntimeError: shape", rerun=None, **nothing),
        record(D, status="skipped", verdict=None, evidence="no CUDA here", **nothing),
        record("handwritten:tie=tied,head=row,zero=0", verdict=None, **nothing),
    ]
    directory = make_run("mixed", records, exit_code=1)
    summary = write_report(directory)
    assert [outcome(r) for r in summary.failing] == ["crash", "hang", "no verdict", "refused", "skipped"]
    assert summary.exit_code == 1
    assert summary.next_command == f"tiebench run --case '{C}' --target deepspeed==0.19.8".replace(f"'{C}'", f"{C}")
    text = (directory / "report.md").read_text()
    assert "Thread 1\n  all_reduce" in text
    assert page(directory).has("NotImplementedError: tied row")


def test_not_finite_error_is_beyond_the_limit(make_run, record) -> None:
    directory = make_run("nan", [record(A), record(B, verdict="bug", error=float("nan"), headroom=None)], exit_code=1)
    text = markdown.render(summarize(load(directory)))
    assert "not finite / 5 sigma" in text
    assert summarize(load(directory)).tightest[0].case == B


def test_killed_run_shows_finished_lost_and_not_run(make_run, record, page, terminal) -> None:
    directory = make_run("killed", [record(A)], plan=[A, B, C], started=[B], end=None, environment=None, tail=b'{"ev')
    summary = write_report(directory)
    assert summary.state == "incomplete"
    assert summary.exit_code == 1
    assert dict(summary.counts) == {"lost": 1, "not run": 1, "rounding": 1}
    text = (directory / "report.md").read_text()
    assert text.startswith("⚠️ **INCOMPLETE: 2 of 3 cases without a result, the run was killed (")
    assert "## 2 cases without a result" in text
    assert "cut off" in text
    assert "environment.json is missing" in text
    for shown in (page(directory).text, [terminal(directory, 200)]):
        joined = "".join(shown)
        assert "lost" in joined
        assert "not run" in joined
        assert "environment.json is missing" in joined


@pytest.mark.parametrize("reason", ["budget", "interrupted", "error"])
def test_all_green_but_ended_early_is_not_green(make_run, record, reason: str) -> None:
    summary = summarize(load(make_run("early", [record(A)], end=reason, exit_code=1)))
    assert summary.state == "incomplete"
    assert summary.exit_code == 1


def test_killed_after_the_last_case_is_not_green(make_run, record) -> None:
    assert summarize(load(make_run("killed", [record(A)], end=None))).exit_code == 1


def test_torn_or_damaged_log_is_not_green(make_run, record) -> None:
    assert summarize(load(make_run("torn", [record(A)], tail=b'{"event"'))).exit_code == 1
    damaged = make_run("damaged", [record(A)], tail=b"nonsense\n")
    assert summarize(load(damaged)).exit_code == 1
    assert "damaged, not counted" in markdown.render(summarize(load(damaged)))


def test_exit_code_of_the_run_is_believed(make_run, record) -> None:
    summary = summarize(load(make_run("code", [record(A)], exit_code=1)))
    assert summary.exit_code == 1
    assert "exit code 1" in summary.headline


def test_empty_plan_is_not_green(make_run, page, terminal) -> None:
    directory = make_run("empty")
    summary = write_report(directory)
    assert summary.state == "empty"
    assert summary.exit_code == 1
    assert (directory / "report.md").read_text().startswith("⚠️ **NOTHING MEASURED")
    assert page(directory).has("NOTHING MEASURED")
    assert "NOTHING MEASURED" in terminal(directory)


def test_what_the_run_could_not_have_seen(make_run, record) -> None:
    findings = (Finding(oracle="gradient", flagged=False, evidence="", error=0.1, limit=7.0, unit="sigma"),)
    summary = summarize(load(make_run("blind", [record(A, findings=findings), record(B, limit=None)])))
    blind = "\n".join(summary.blind)
    assert "gradient: nothing below 7 sigma" in blind
    assert "another value of tie=tied, zero=0" in blind
    assert "1 green case had no numeric check" in blind


def test_oddities_are_noted(make_run, record) -> None:
    records = [
        record(A, environment="e1", patch="my.py sha256:1", wall_seconds=21.0, attempt=2),
        record(B, environment="e2", target="deepspeed==0.19.5", fault="halve"),
        record(C, environment="e2", target="deepspeed==0.19.8"),
    ]
    notes = "\n".join(summarize(load(make_run("odd", records, budget_seconds=10.0))).notes)
    for words in (
        "2 different environments",
        "the cases of deepspeed ran against 2 targets",
        "patched by the user: my.py",
        "bug put in on purpose",
        "longer than the case's own limit",
        "over its budget by",
        "more than one attempt",
    ):
        assert words in notes


def hostile_run(make_run, record) -> Path:
    case = "deepspeed:" + HOSTILE
    bad = record(
        case,
        verdict="bug",
        oracle=HOSTILE,
        evidence=HOSTILE,
        error_of=HOSTILE,
        fault=HOSTILE,
        patch=HOSTILE,
        rerun=HOSTILE,
        stacks=HOSTILE,
        path=HOSTILE,
        target=HOSTILE,
        factors={HOSTILE: HOSTILE},
        findings=(Finding(oracle=HOSTILE, flagged=True, evidence=HOSTILE + "2", error=0.5, limit=5.0, unit=HOSTILE),),
    )
    return make_run(
        "hostile",
        [bad, record(A)],
        plan=[case, A, "x:" + HOSTILE],
        end="error",
        exit_code=1,
        environment={HOSTILE: {HOSTILE: HOSTILE}},
        target=HOSTILE,
        command=HOSTILE,
        tiebench=HOSTILE,
    )


def test_hostile_strings_in_markdown(make_run, record) -> None:
    text = markdown.render(summarize(load(hostile_run(make_run, record))))
    assert "\x1b" not in text
    blocks = re.compile(r"^(`{3,})[a-z]*\n.*?\n\1$", re.S | re.M)
    assert len(blocks.findall(text)) >= 4
    prose = blocks.sub("", text)  # what is left outside fenced blocks …
    prose = re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", prose)  # … and outside code spans
    assert "<script" not in prose
    assert "[x](" not in prose
    assert "@team" not in prose
    assert not re.search(r"^# heading", prose, re.M)
    table = [line for line in text.splitlines() if line.startswith("| ````deepspeed:")]
    assert len(table) == 1
    assert len(re.findall(r"(?<!\\)\|", table[0])) == 10  # nine cells, whatever the text has


def test_hostile_strings_in_html(make_run, record, page) -> None:
    shown = page(hostile_run(make_run, record))
    assert [tag for tag, _ in shown.tags].count("script") == 1
    assert not any(name.startswith("on") for _, attributes in shown.tags for name in attributes)
    assert shown.has("<script>alert(1)</script>")
    assert shown.has("{{ 7*7 }}")
    assert not any("\x1b" in part for part in shown.text)


def test_hostile_strings_in_the_terminal(make_run, record, terminal) -> None:
    printed = terminal(hostile_run(make_run, record), 200)
    assert "\x1b" not in printed
    assert "\\x1b[31m[bold]red[/bold]" in printed


def test_html_is_self_contained(make_run, record, page) -> None:
    directory = make_run("page", [record(A), record(B, verdict="bug", error=50.0, headroom=0.1)], exit_code=1)
    shown = page(directory)
    for tag, attributes in shown.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    source = html.render(summarize(load(directory)))
    assert "@import" not in source
    assert "url(" not in source
    assert not re.search(r"https?://", source)
    assert "prefers-color-scheme: dark" in source
    targets = {attributes["id"] for _, attributes in shown.tags if "id" in attributes}
    links = {attributes["href"].removeprefix("#") for tag, attributes in shown.tags if tag == "a"}
    assert links
    assert links <= targets
    assert [tag for tag, _ in shown.tags].count("circle") == 2


def test_html_policy_names_the_script_that_is_there(make_run, record) -> None:
    import base64
    import hashlib

    source = html.render(summarize(load(make_run("page", [record(A)]))))
    script = source[source.index("<script>") + len("<script>") : source.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in source


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
def test_terminal_keeps_every_row_at_every_width(make_run, record, terminal, width: int) -> None:
    long = "handwritten:tie=untied,head=gathered,zero=2,hidden=35,vocab=67,optimizer=adamw,accumulate=2"
    printed = terminal(make_run("wide", [record(A), record(B), record(long)]), width)
    assert printed.count("rounding") >= 3
    table = printed[: printed.index("3 cases")]
    squeezed = re.sub(r"rounding.*", "", table)
    squeezed = re.sub(r"\s", "", squeezed)
    for part in "optimizer=adamw", "vocab=67", "accumulate=2":
        assert part in squeezed
    assert all(len(line) <= width for line in table.splitlines())


def test_report_replaces_the_old_one_and_says_why_it_cannot(make_run, record, tmp_path: Path) -> None:
    directory = make_run("again", [record(A)])
    (directory / "report.md").write_text("old")
    write_report(directory)
    assert (directory / "report.md").read_text().startswith("✅")
    assert {p.name for p in directory.iterdir()} == {EVENTS, "environment.json", "report.md", "report.html"}
    with pytest.raises(LogError, match="no run directory"):
        write_report(tmp_path / "nothing")


def test_a_fault_that_was_not_caught_is_red(make_run, record, terminal) -> None:
    directory = make_run(
        "fault", [record(A), record(B, fault="copied_tie", evidence="fault copied_tie was not caught")]
    )
    summary = write_report(directory)
    assert (summary.state, summary.exit_code) == ("red", 1)
    assert outcome(summary.failing[0]) == "fault not caught"
    for text in ((directory / "report.md").read_text(), terminal(directory)):
        assert "1 fault not caught" in text
        assert "fault copied" in text


def test_a_green_record_that_contradicts_itself_is_red(make_run, record, terminal) -> None:
    directory = make_run("odd", [record(A, error=99.0, headroom=5 / 99)])
    summary = write_report(directory)
    assert (summary.state, summary.exit_code) == ("red", 1)
    assert outcome(summary.failing[0]) == "contradictory"
    assert "is rounding, but gradient is beyond its limit" in terminal(directory)


def test_a_case_over_its_limit_is_told_in_the_headline(make_run, record) -> None:
    directory = make_run("slow", [record(A, wall_seconds=82.0, judge_seconds=76.0)])
    summary = write_report(directory)
    assert summary.headline == "GREEN: the one case is as expected (1 rounding; 1 over the time limit of a case)"
    assert f"1 case took longer than the case's own limit: {A}" in summary.notes


def test_headroom_of_a_bug_is_short(make_run, record, page) -> None:
    directory = make_run("far", [record(A, verdict="bug", error=2.7e6, headroom=5 / 2.7e6)], exit_code=1)
    write_report(directory)
    assert "| <0.001× |" in (directory / "report.md").read_text()  # noqa: RUF001
    assert page(directory).has("<0.001×")  # noqa: RUF001


def test_targets_are_those_whose_cases_ran(make_run, record) -> None:
    names = {"deepspeed": "deepspeed==0.19.8", "handwritten": "torch==2.13.0"}
    both = [record(A, target="torch==2.13.0"), record(B)]
    assert summarize(load(make_run("two", both, targets=names))).target == "deepspeed==0.19.8, torch==2.13.0"
    killed = summarize(load(make_run("none", plan=[A, B], end=None, targets=names)))
    assert killed.target == "deepspeed==0.19.8"
    assert [r.target for r in killed.records] == ["torch==2.13.0", "deepspeed==0.19.8"]
