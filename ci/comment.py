"""Post a comparison as the one comment of its pull request: made once, edited from then on. Standard library only.

Runs in the workflow that may write, after the one that ran the pull request's code; see
.github/workflows/pull-request-comment.yml. All that the other workflow left is untrusted:

- Which pull request: the open one whose head is the very commit that ran, asked of GitHub by what GitHub says in the
  event. None, or a newer commit: nothing is posted.
- The artifact: bounded before and after it is unpacked, one file of it read, never written to disk, must be UTF-8 and
  begin with the marker. Mentions are defused, and a line says who wrote the text.

Exit code 0: posted, or rightly nothing to post; 2: it could not be, with one line that says why.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "<!-- tiebench compare -->"  # what `tiebench compare` begins with (reports/compare.py)
ARTIFACT, FILE = "comparison", "comment.md"
AUTHOR = "github-actions[bot]"
MOST_PACKED = 1_000_000  # bytes
MOST_TEXT = 65_000  # bytes; GitHub refuses comments above 65536 characters
MOST_PAGES = 30  # of 100 entries
ORIGIN = "<sub>Written by this pull request's own code.</sub>"


class CommentError(Exception):
    """Why there is no comment, in one line."""


@dataclass(frozen=True)
class GitHub:
    """The REST interface, for one repository."""

    url: str
    repository: str
    token: str

    def call(self, method: str, path: str, query: Mapping[str, object] | None = None, body: object = None) -> Any:
        """JSON in, JSON out. `path` is below the repository.

        Raises:
            CommentError: no success.
        """
        return json.loads(self.raw(method, path, query, body, limit=20_000_000))

    def raw(
        self, method: str, path: str, query: Mapping[str, object] | None = None, body: object = None, *, limit: int
    ) -> bytes:
        """The answer's bytes, at most `limit`.

        Raises:
            CommentError: no success, or a longer answer.
        """
        url = f"{self.url}/repos/{self.repository}/{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, method=method)
        request.add_header("Accept", "application/vnd.github+json")
        # Not repeated on a redirect: artifacts come from another host, which has no business with the token.
        request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found: bytes = answer.read(limit + 1)
        except urllib.error.HTTPError as error:
            raise CommentError(f"{method} {path}: GitHub says {error.code} {error.reason}") from None
        except OSError as error:
            raise CommentError(f"{method} {path}: {getattr(error, 'reason', None) or error}") from None
        if len(found) > limit:
            raise CommentError(f"{method} {path}: more than {limit} bytes")
        return found

    def pages(self, path: str, query: Mapping[str, object], key: str | None = None) -> list[Any]:
        """All entries of a list, page by page."""
        found: list[Any] = []
        for page in range(1, MOST_PAGES + 1):
            part = self.call("GET", path, {**query, "per_page": 100, "page": page})
            part = part[key] if key else part
            found += part
            if len(part) < 100:
                break
        return found


def pull_request(github: GitHub, run: Mapping[str, Any]) -> int | None:
    """Number of the open pull request whose head is the commit that ran; None where it has moved on or was closed."""
    owner = (run.get("head_repository") or {}).get("owner", {}).get("login")
    if not owner or not run.get("head_branch"):
        return None
    query = {"state": "open", "head": f"{owner}:{run['head_branch']}"}
    for found in github.pages("pulls", query):
        if found["head"]["sha"] == run["head_sha"] and found["base"]["repo"]["full_name"] == github.repository:
            return int(found["number"])
    return None


def comparison(github: GitHub, run: Mapping[str, Any]) -> str | None:
    """Text of the artifact, made safe to post; None where the run left none.

    Raises:
        CommentError: the artifact is not what it must be.
    """
    artifacts = github.pages(f"actions/runs/{int(run['id'])}/artifacts", {"name": ARTIFACT}, "artifacts")
    artifacts = [a for a in artifacts if a["name"] == ARTIFACT and not a["expired"]]
    if not artifacts:
        return None
    newest = max(artifacts, key=lambda a: int(a["id"]))
    if newest["size_in_bytes"] > MOST_PACKED:
        raise CommentError(f"artifact {ARTIFACT}: {newest['size_in_bytes']} bytes, more than {MOST_PACKED}")
    return safe(unpack(github.raw("GET", f"actions/artifacts/{int(newest['id'])}/zip", limit=MOST_PACKED)))


def unpack(packed: bytes) -> str:
    """The comment out of the artifact's archive; no more of it is unpacked than may be posted.

    Raises:
        CommentError: no archive, no such file in it, too long, or no UTF-8.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive, archive.open(FILE) as stream:
            text = stream.read(MOST_TEXT + 1)
    except KeyError:
        raise CommentError(f"artifact {ARTIFACT} has no {FILE}") from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CommentError(f"artifact {ARTIFACT} cannot be unpacked: {error}") from None
    if len(text) > MOST_TEXT:
        raise CommentError(f"{FILE} is longer than {MOST_TEXT} bytes")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommentError(f"{FILE} is no UTF-8: {error}") from None


def safe(text: str) -> str:
    """The text with the marker first, its origin next, and nobody called by name.

    Raises:
        CommentError: it does not begin with the marker.
    """
    if not text.startswith(MARKER):
        raise CommentError(f"{FILE} does not begin with {MARKER}")
    rest = text[len(MARKER) :]
    # A zero-width space, so that nobody is notified and no issue gets a back-link; a@b (targets) stays as it is.
    rest = re.sub(r"(?<![A-Za-z0-9_])([@#])(?=[A-Za-z0-9])", "\\1\u200b", rest)
    return f"{MARKER}\n{ORIGIN}\n{rest}"


def post(github: GitHub, number: int, text: str) -> str:
    """Make the comment or edit the one that is there; its address."""
    for comment in github.pages(f"issues/{number}/comments", {}):
        author = comment.get("user") or {}
        if author.get("login") == AUTHOR and author.get("type") == "Bot" and comment["body"].startswith(MARKER):
            found = github.call("PATCH", f"issues/comments/{int(comment['id'])}", body={"body": text})
            return f"edited {found['html_url']}"
    found = github.call("POST", f"issues/{number}/comments", body={"body": text})
    return f"made {found['html_url']}"


def main(environment: Mapping[str, str]) -> int:
    """Post what the run of the event left."""
    try:
        run = json.loads(Path(environment["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))["workflow_run"]
        github = GitHub(
            environment.get("GITHUB_API_URL", "https://api.github.com"),
            environment["GITHUB_REPOSITORY"],
            environment["GITHUB_TOKEN"],
        )
        number = pull_request(github, run)
        if number is None:
            print(f"no open pull request has {run['head_sha']} as its head: nothing to comment on")
            return 0
        text = comparison(github, run)
        if text is None:
            print("the run left no comparison: its own log says why")
            return 0
        print(post(github, number, text))
    except CommentError as error:
        print(f"comment: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, ValueError, OSError) as error:
        print(f"comment: the event or an answer is not as expected: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
