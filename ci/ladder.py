"""Ladders: the same cases against many builds of a framework, each in a run directory of its own; and over commits,
where only what differs between the ends is looked for in between.

A build that cannot be installed or imported is one line, and the others go on. What is on disk already is not run
again.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from ci import records, supervisor, targets
from ci.ranks import Settings
from ci.subject import PACKAGE, SetupError, Subject
from ci.targets import TargetError
from reports import ladder as reading
from reports.ladder import Rung
from suites.cases import Case

Say = Callable[[str], None]
GIT_SECONDS = 600


class LadderError(Exception):
    """What keeps a whole ladder from being made, in one line for people."""


@dataclass(frozen=True)
class Culprit:
    """Where between two commits a family changed.

    Args:
        commit: the first with another outcome than the first end's; `subject`: its headline.
        unsure: commits right before it that could not be built or run: it may be one of these.
    """

    family: str
    before: str
    after: str
    commit: str
    subject: str
    unsure: tuple[str, ...] = ()


@dataclass
class Ladder:
    """Runs cases against builds.

    Args:
        cases: all of the framework that is tested.
        out: directory in which each build has its run directory.
        budget: seconds for the cases of one build.
    """

    cases: Sequence[Case]
    out: Path
    settings: Settings
    say: Say
    plan: str = "ladder"
    budget: float | None = None
    rungs: dict[str, Rung] = field(default_factory=dict)

    def climb(self, requirements: Iterable[str]) -> list[Rung]:
        """One rung a requirement, in their order.

        Raises:
            SetupError, LogError: this program or its directory, not a build, is to blame.
        """
        return [self.rung(requirement, self.cases) for requirement in requirements]

    def rung(self, requirement: str, cases: Sequence[Case], label: str = "") -> Rung:
        """Results of one build; where it cannot be had or asked, the reason."""
        try:
            build = targets.install(requirement, self.say)
        except TargetError as error:
            self.say(str(error))
            return reading.rung(label or requirement, None, f"cannot be installed: {error}")
        mine = [case for case in cases if PACKAGE.get(case.path, case.path) == build.distribution]
        name = label or build.label
        if not mine:
            return reading.rung(name, None, f"no case tests {build.distribution}")
        directory = self.out / _slug(label or requirement)
        subject = Subject(build=build)
        settings = replace(self.settings, target=build.directory, build=(build.distribution, build.version))
        self.say(f"{name}: {len(mine)} case{'s' if len(mine) > 1 else ''}, results in {directory}")
        try:
            return reading.rung(name, self._run(mine, directory, subject, settings))
        except SetupError as error:
            self.say(f"{name}: {error}")
            return reading.rung(name, None, f"cannot be run: {error}")

    def _run(self, cases: Sequence[Case], directory: Path, subject: Subject, settings: Settings) -> records.Run:
        command = f"tiebench ladder {subject.build.requirement if subject.build else ''}"
        told = {"subject": subject, "settings": settings, "command": command}
        if (directory / records.EVENTS).is_file() and not records.is_stillborn(directory):
            before = records.read_run(directory)
            if set(before.plan.cases) != {case.id for case in cases}:
                raise SetupError(f"{directory} holds a run of other cases: choose another --out")
            if before.end is not None and not before.todo:
                self.say(f"{directory}: is there already")
                return before
            return supervisor.resume(directory, **told)  # type: ignore[arg-type]
        return supervisor.run(cases, directory, plan=self.plan, budget=self.budget, **told)  # type: ignore[arg-type]


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[-80:] or "build"


@dataclass(frozen=True)
class Repository:
    """A git repository whose commits are builds.

    Args:
        place: path or URL.
        clone: bare copy on this machine.
    """

    place: str
    clone: Path

    @classmethod
    def open(cls, place: str, work: Path, say: Say) -> Repository:
        """A bare copy of a repository below `work`.

        Raises:
            LadderError: there is none at that place.
        """
        clone = work.absolute() / "repository.git"
        if clone.exists():
            return cls(place, clone)
        say(f"cloning {place}")
        work.mkdir(parents=True, exist_ok=True)
        source = str(Path(place).resolve()) if Path(place).exists() else place
        _git(["clone", "--quiet", "--bare", source, str(clone)], f"--repo {place}")
        return cls(place, clone)

    def commits(self, span: str) -> list[tuple[str, str]]:
        """Commits of ``A..B`` with their headlines, A first.

        Raises:
            LadderError: no such commits, or A is no ancestor of B.
        """
        first, dots, last = span.partition("..")
        if not (first and dots and last) or last.startswith("."):
            raise LadderError(f"--commits {span}: write it as A..B, the older commit first")
        what = f"--commits {span}"
        ends = [
            self._ask(what, "rev-parse", "--verify", "--end-of-options", f"{n}^{{commit}}")[0] for n in (first, last)
        ]
        between = f"{ends[0]}..{ends[1]}"
        if not self._ask(what, "rev-list", "--ancestry-path", between):
            raise LadderError(f"{what}: {first} is no ancestor of {last}, or the same commit")
        chain = [ends[0], *self._ask(what, "rev-list", "--reverse", "--first-parent", between)]
        return list(zip(chain, self._ask(what, "log", "--no-walk=unsorted", "--format=%s", *chain), strict=True))

    def _ask(self, what: str, *words: str) -> list[str]:
        return _git(["--git-dir", str(self.clone), *words], what).splitlines()

    def requirement(self, commit: str) -> str:
        """What pip is given for a commit."""
        return f"git+file://{quote(str(self.clone))}@{commit}"


def _git(words: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LadderError(f"{what}: git: {error}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no such commit or repository"])[-1]
        raise LadderError(f"{what}: {said}")
    return done.stdout


def bisect(
    ladder: Ladder, repository: Repository, commits: Sequence[tuple[str, str]], most_builds: int
) -> tuple[list[Rung], list[Culprit], list[str]]:
    """Run all cases at both ends; where a family differs, one of its cases at commits in between.

    Returns:
        the two ends, what was found, and families that were not found within `most_builds` further builds.
    """
    label = {commit: f"{commit[:12]} {headline[:40]}".strip() for commit, headline in commits}
    first, last = (ladder.rung(repository.requirement(c), ladder.cases, label[c]) for c, _ in (commits[0], commits[-1]))
    culprits: list[Culprit] = []
    left: list[str] = []
    if first.problem or last.problem:
        return [first, last], culprits, left
    seen: dict[tuple[int, str], str | None] = {}
    builds: set[int] = set()
    changed = [family for family in reading.families([first, last]) if family.changes]
    ends = {family.name: Case.parse(family.cases[0]) for family in changed}

    def ask(place: int, pending: Sequence[str]) -> None:
        """Outcome of one case of each family at a commit; None where it cannot be had."""
        commit = commits[place][0]
        builds.add(place)
        asked = [ends[name] for name in pending]
        one = ladder.rung(repository.requirement(commit), list(dict.fromkeys(asked)), label[commit])
        for name in pending:
            seen[place, name] = None if one.problem else one.outcomes.get(ends[name].id)

    for family in changed:
        low, high, before = 0, len(commits) - 1, str(family.outcomes[0])
        dead: set[int] = set()
        while (between := [p for p in range(low + 1, high) if p not in dead]) and len(builds) < most_builds:
            place = between[len(between) // 2]
            if (place, family.name) not in seen:
                ask(place, [f.name for f in changed if (place, f.name) not in seen])
            word = seen.get((place, family.name))
            if word is None:
                dead.add(place)
            elif word == before:
                low = place
            else:
                high = place
        if [p for p in range(low + 1, high) if p not in dead]:
            left.append(family.name)
            continue
        commit, headline = commits[high]
        word = seen.get((high, family.name)) or str(family.outcomes[-1])
        unsure = tuple(commits[p][0] for p in range(low + 1, high))
        culprits.append(Culprit(family.name, before, word, commit, headline, unsure))
    return [first, last], culprits, left
