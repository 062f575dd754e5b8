"""The flat table: every column, every kind of run directory, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pandas as pd
import pytest

from ci.records import ENVIRONMENT, EVENTS, LogError, Record
from reports import columns
from reports.columns import BY_NAME, COLUMNS, METRICS, columns_of, error_unit
from reports.load import flatten, load
from reports.records import flat

A, B = "handwritten:tie=tied,head=row,zero=0", "deepspeed:tie=untied,head=vocab,zero=2"


def test_every_field_of_a_record_is_a_column_or_said_not_to_be() -> None:
    nested = {"findings", "factors", "step_seconds", "stacks", "collectives", "measured", "dormant"}
    assert set(Record.__struct_fields__) - nested == set(BY_NAME) - {"error_unit", "visibility", "slope"}
    assert len(BY_NAME) == len(COLUMNS)


def test_every_metric_has_unit_and_direction() -> None:
    assert {m.name for m in METRICS} >= {
        "error",
        "headroom",
        "seconds_per_step",
        "tokens_per_second",
        "peak_memory_bytes",
    }
    assert all(m.unit and m.kind != "text" for m in METRICS)
    assert all(c.meaning for c in COLUMNS)
    assert BY_NAME["tokens_per_second"].direction == "higher"
    assert BY_NAME["seconds_per_step"].direction == "lower"


def test_frame(make_run, record) -> None:
    run = load(make_run("r", [record(A), record(B, error=None, limit=None, headroom=None, verdict="crash")]))
    frame = run.frame
    assert list(frame["case"]) == [A, B]
    assert list(frame.columns) == [c.name for c in columns_of(run.run.records)]
    assert list(frame["factor_zero"]) == ["0", "2"]
    assert frame["error"].dtype == "float64"
    assert frame["peak_memory_bytes"].dtype == "Int64"
    assert math.isnan(frame["error"][1])
    assert pd.isna(frame["oracle"][0])
    assert frame["error_unit"][0] == "sigma"
    assert run.environment["packages"]["torch"] == "2.13.0"
    assert run.notes == ()


def test_empty_plan_has_the_columns(make_run) -> None:
    frame = load(make_run("empty")).frame
    assert len(frame) == 0
    assert list(frame.columns) == [c.name for c in COLUMNS]


def test_error_zero_has_infinite_headroom_although_json_has_none(make_run, record) -> None:
    directory = make_run("zero", [record(A, error=0.0, headroom=math.inf)])
    assert load(directory).frame["headroom"][0] == math.inf
    assert json.loads(flat(directory, "json"))[0]["headroom"] is None
    assert next(csv.DictReader(io.StringIO(flat(directory, "csv"))))["headroom"] == "inf"


def test_unit_comes_from_the_finding_with_that_error(record) -> None:
    assert error_unit(record(A)) == "sigma"
    assert error_unit(record(A, findings=())) is None


def test_killed_run(make_run, record) -> None:
    directory = make_run(
        "killed", [record(A)], plan=[A, B, "x:y=1"], started=[B], end=None, environment=None, tail=b'{"ev'
    )
    run = load(directory)
    assert list(run.frame["status"]) == ["finished", "lost", "not_run"]
    assert run.environment == {}
    assert any("environment.json is missing" in note for note in run.notes)
    assert any("cut off" in note for note in run.notes)


def test_damaged_middle_line_is_told(make_run, record) -> None:
    directory = make_run("damaged", [record(A), record(B)])
    lines = (directory / EVENTS).read_bytes().split(b"\n")
    lines[2] = b"\xff{nonsense"
    (directory / EVENTS).write_bytes(b"\n".join(lines))
    run = load(directory)
    assert list(run.frame["status"]) == ["lost", "finished"]
    assert any("line 3" in note for note in run.notes)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_bad_environment_is_a_note(make_run, record, content: bytes) -> None:
    directory = make_run("r", [record(A)])
    (directory / ENVIRONMENT).write_bytes(content)
    run = load(directory)
    assert run.environment == {}
    assert len(run.notes) == 1


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no run directory"):
        load(tmp_path / "nothing")


def test_flatten() -> None:
    tree = {"a": {"b": 1, "c": None}, "d": ["x", 2], "e": True}
    assert flatten(tree) == {"a.b": "1", "a.c": "null", "d": "x, 2", "e": "true"}


def test_json_is_a_list_of_objects(make_run, record) -> None:
    table = json.loads(flat(make_run("r", [record(A), record(B, verdict=None, status="skipped")]), "json"))
    assert [row["case"] for row in table] == [A, B]
    assert table[1]["verdict"] is None
    assert table[0]["seconds_per_step"] == 0.02
    assert table[0]["peak_memory_bytes"] == 400 * 2**20
    assert table[0]["factor_head"] == "row"


def test_csv_reads_back_and_runs_no_formula(make_run, record) -> None:
    evidence = '=HYPERLINK("http://x")'
    text = flat(make_run("r", [record(A, evidence=evidence, error=-1.0), record(B, evidence='a,"b"\nc|d')]), "csv")
    first, second = csv.DictReader(io.StringIO(text))
    assert first["evidence"] == "'" + evidence
    assert first["error"] == "-1.0"
    assert second["evidence"] == 'a,"b"\nc|d'
    assert second["oracle"] == ""
    assert second["peak_memory_bytes"] == str(400 * 2**20)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t=", "  ="])
def test_csv_guards_every_start_of_a_formula(make_run, record, start: str) -> None:
    (row,) = csv.DictReader(io.StringIO(flat(make_run("r", [record(A, evidence=start + "1")]), "csv")))
    assert row["evidence"] == f"'{start}1"


def test_unknown_format(make_run, record) -> None:
    with pytest.raises(ValueError, match="one of csv, json"):
        flat(make_run("r", [record(A)]), "xml")


def test_readme_has_the_table_of_columns():
    readme = Path(__file__).resolve().parents[1] / "README.md"
    assert columns.table_markdown() in readme.read_text()
