"""Every command in every document is run, in the order in which the document gives them, and every link leads
somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(p for p in ROOT.glob("**/*.md") if not {".venv", ".asv", "runs", "node_modules"} & set(p.parts))

# Exit codes other than 0 that a document's command has by design, by a part of the command.
EXIT_CODES = {
    "--target deepspeed==0.19.6": 1,  # upstream refuses row heads there: the report is red
    "tiebench compare runs/base runs/head": 1,
}
# Commands that are not run here, and why.
NOT_RUN = {
    "ci/test": "this test is part of it",
    "torchrun ": "needs two machines; two agents on loopback are in test_nodes.py",
    "modal ": "needs an account; what it would run is tested in test_modal.py",
}


def commands(document: Path) -> list[str]:
    """Lines of the document's ``sh`` blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def not_run(command: str) -> bool:
    return any(command == key or (key.endswith(" ") and f" {key}" in f" {command}") for key in NOT_RUN)


def test_there_are_documents_with_commands():
    assert ROOT / "README.md" in DOCUMENTS
    assert commands(ROOT / "README.md")[:2] == ["ci/nightly", "ci/test"]
    for room in ("suites", "ci", "reports", "benchmarks"):
        assert ROOT / room / "README.md" in DOCUMENTS


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_commands_work(document, tmp_path):
    environment = {**os.environ, "TIEBENCH_DOCUMENTS": "1"}
    for command in commands(document):
        if not_run(command):
            continue
        here = command.replace(".venv/bin/", f"{sys.prefix}/bin/").replace("runs/", f"{tmp_path}/runs/")
        words = shlex.split(here)
        if words[0] == "ci/nightly" and "--out" not in words:
            words += ["--out", f"{tmp_path}/runs/nightly"]
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        wanted = next((code for part, code in EXIT_CODES.items() if part in command), 0)
        said = f"{command}\nexit code {done.returncode}, wanted {wanted}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert done.returncode == wanted, said
        assert "Traceback" not in done.stdout + done.stderr, said


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_and_files_exist(document):
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name}: {target}"
    for name in re.findall(r"`((?:suites|ci|reports|benchmarks)/[\w./-]+\.(?:py|md))`", text):
        assert (ROOT / name).exists(), f"{document.name} names {name}"
