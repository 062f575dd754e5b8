"""The commenting step against a stand-in for GitHub's REST interface: one comment, hostile artifacts."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ci import comment
from ci.tests.conftest import ROOT
from reports import compare

SHA = "a" * 40
TEXT = f"{comment.MARKER}\n\n**GREEN** @octocat and #12, `deepspeed @ git+https://x/y@abc`\n"


def zipped(text: bytes | str = TEXT, name: str = comment.FILE) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, text)
    return packed.getvalue()


class FakeGitHub:
    """What the script asks for, and a note of every request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], str | None]] = []
        self.archive = zipped()
        self.artifacts = [{"id": 5, "name": "comparison", "expired": False, "size_in_bytes": 300}]
        self.pulls = [pull(7, SHA)]
        self.comments: list[dict[str, Any]] = []
        self.refuse: set[str] = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def answer(self) -> None:
                parts = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(parts.query))
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                fake.asked.append((self.command, parts.path, query, self.headers.get("Authorization")))
                code, found = fake.reply(self.command, parts.path, query, body)
                if code == 302:
                    self.send_response(302)
                    self.send_header("Location", f"http://127.0.0.1:{fake.port}/storage")
                    self.end_headers()
                    return
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def reply(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        page = slice((int(query.get("page", 1)) - 1) * 100, int(query.get("page", 1)) * 100)
        below = path.removeprefix("/repos/me/it/")
        if below in self.refuse:
            return 403, {"message": "no"}
        if path == "/storage":
            return 200, self.archive
        if (method, below) == ("GET", "pulls"):
            return 200, self.pulls[page]
        if (method, below) == ("GET", "actions/runs/3/artifacts"):
            return 200, {"artifacts": self.artifacts[page]}
        if (method, below) == ("GET", "actions/artifacts/5/zip"):
            return 302, None
        if (method, below) == ("GET", "issues/7/comments"):
            return 200, self.comments[page]
        if (method, below) == ("POST", "issues/7/comments"):
            self.comments.append(bot(body["body"], len(self.comments)))
            return 201, self.comments[-1]
        number = int(below.removeprefix("issues/comments/")) if below.startswith("issues/comments/") else -1
        if method == "PATCH" and 0 <= number < len(self.comments):
            self.comments[number]["body"] = body["body"]
            return 200, self.comments[number]
        return 404, {}


def pull(number: int, sha: str, base: str = "me/it") -> dict[str, Any]:
    return {"number": number, "head": {"sha": sha}, "base": {"repo": {"full_name": base}}}


def bot(body: str, number: int, login: str = comment.AUTHOR, kind: str = "Bot") -> dict[str, Any]:
    return {"id": number, "body": body, "html_url": f"https://x/{number}", "user": {"login": login, "type": kind}}


@pytest.fixture
def github() -> Iterator[FakeGitHub]:
    fake = FakeGitHub()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def post(github: FakeGitHub, tmp_path: Path) -> Callable[..., int]:
    """The script's main on an event like GitHub's."""

    def go(**changes: Any) -> int:
        run = {"id": 3, "head_sha": SHA, "head_branch": "fix", "head_repository": {"owner": {"login": "you"}}}
        event = tmp_path / "event.json"
        event.write_text(json.dumps({"workflow_run": run | changes}))
        return comment.main(
            {
                "GITHUB_EVENT_PATH": str(event),
                "GITHUB_API_URL": f"http://127.0.0.1:{github.port}",
                "GITHUB_REPOSITORY": "me/it",
                "GITHUB_TOKEN": "secret",
            }
        )

    return go


def test_the_marker_is_the_reports():
    assert comment.MARKER == compare.MARKER
    assert comment.MOST_TEXT >= compare.MOST_CHARACTERS


def test_one_comment_is_made_and_then_edited(github, post, capsys):
    assert post() == 0
    (made,) = github.comments
    assert made["body"].startswith(f"{comment.MARKER}\n{comment.ORIGIN}\n")
    assert "@\u200boctocat and #\u200b12" in made["body"]
    assert "deepspeed @ git+https://x/y@abc" in made["body"], "a target is still one that can be copied"
    github.archive = zipped(TEXT.replace("GREEN", "RED"))
    assert post() == 0
    assert len(github.comments) == 1
    assert "RED" in github.comments[0]["body"]
    assert "edited https://x/0" in capsys.readouterr().out
    assert {(m, p) for m, p, _, _ in github.asked if m != "GET"} == {
        ("POST", "/repos/me/it/issues/7/comments"),
        ("PATCH", "/repos/me/it/issues/comments/0"),
    }


def test_only_its_own_comment_is_edited(github, post):
    github.comments = [bot("talk", i) for i in range(120)]
    github.comments += [bot(TEXT, 120, login="mallory", kind="User"), bot(f"> {TEXT}", 121)]
    github.comments += [bot(TEXT, 122, login="other[bot]")]
    assert post() == 0
    assert [c["body"] for c in github.comments[120:123]] == [TEXT, f"> {TEXT}", TEXT]
    assert len(github.comments) == 124, "made a new one, on the second page"


def test_the_token_does_not_follow_a_redirect(github, post):
    assert post() == 0
    by_path = {path: authorization for _, path, _, authorization in github.asked}
    assert by_path["/storage"] is None
    assert all(a == "Bearer secret" for path, a in by_path.items() if path != "/storage")


@pytest.mark.parametrize(
    "pulls", [[], [pull(7, "b" * 40)], [pull(7, SHA, base="other/it")]], ids=["closed", "newer commit", "other base"]
)
def test_nothing_is_posted_for_another_pull_request(github, post, capsys, pulls):
    github.pulls = pulls
    assert post() == 0
    assert "nothing to comment on" in capsys.readouterr().out
    assert not github.comments
    asked = github.asked[0][2]
    assert (asked["head"], asked["state"]) == ("you:fix", "open")


def test_a_deleted_fork_and_a_run_without_artifact_are_no_errors(github, post):
    assert post(head_repository=None) == 0
    github.artifacts = [{**github.artifacts[0], "name": "runs"}, {**github.artifacts[0], "expired": True}]
    assert post() == 0
    assert not github.comments


@pytest.mark.parametrize(
    ("archive", "said"),
    [
        (b"not a zip", "cannot be unpacked"),
        (zipped()[:-30], "cannot be unpacked"),
        (zipped(name="../../comment.md"), "has no comment.md"),
        (zipped("hello"), "does not begin with"),
        (zipped(comment.MARKER + "x" * 10_000_000), "longer than 65000"),
        (zipped(comment.MARKER.encode() + b"\xff"), "no UTF-8"),
        (b"0" * (comment.MOST_PACKED + 1), "more than 1000000 bytes"),
    ],
    ids=["no zip", "torn", "path", "no marker", "bomb", "bytes", "longer than said"],
)
def test_a_hostile_artifact_is_refused_in_one_line(github, post, capsys, archive, said):
    github.archive = archive
    assert post() == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not github.comments


def test_a_large_artifact_is_not_even_fetched(github, post, capsys):
    github.artifacts[0]["size_in_bytes"] = comment.MOST_PACKED + 1
    assert post() == 2
    assert "1000001 bytes" in capsys.readouterr().err
    assert not any(path.endswith("zip") for _, path, _, _ in github.asked)


def test_refusals_and_strange_events_are_one_line(github, post, capsys, tmp_path):
    github.refuse = {"issues/7/comments"}
    assert post() == 2
    assert "issues/7/comments: GitHub says 403" in capsys.readouterr().err
    assert post(id="3; rm") == 2
    assert comment.main({"GITHUB_EVENT_PATH": str(tmp_path / "none")}) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_it_needs_nothing_installed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "ci" / "comment.py")],
        env={"GITHUB_EVENT_PATH": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("comment: ")
