"""What a record says of ranks that did not do what they were told: refused, crashed, hung, or were ended too early."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ci import channel as ch
from ci import hangs, records
from ci.ranks import Outcome, check_writable, is_secondary
from ci.records import Record
from ci.subject import SetupError
from suites import bug_classes, expectations
from suites.cases import Case
from suites.lifecycle import Lifecycle, broken_tie

EVIDENCE_LIMIT = 900

HANG = records.Guess(bug_class=27, name=bug_classes.NAMES[27], why="some ranks wait for what others never send")
LOST = records.Guess(bug_class=1, name=bug_classes.NAMES[1], why="embedding and head are no longer one weight")
BY_REPLACEMENT = records.Guess(bug_class=2, name=bug_classes.NAMES[2], why="it is lost when sharded layers are put in")
# Causes of a hang that are of this class, by `ci.hangs`; the others are no business of any collective.
OF_COLLECTIVES = (
    "different sizes", "different order", "different collectives", "collective left out", "unmatched message",
    "collective does not end", "unknown",
)  # fmt: skip

MOST_PARTS = 3  # of a model, named in one sentence
BY_SOMEBODY = ("was killed by SIGKILL", "was killed by SIGTERM")  # no full disk ends a process like that


def failed(case: Case, outcome: Outcome, what: str, directory: Path, *, cut: bool) -> dict[str, Any]:
    """Fields of the record of a case whose ranks did not all do what they were told.

    Args:
        what: the limit that was over, should it have been over; cut: that was the rest of the run's budget.
        directory: run directory, which must still be writable: else the target is not to blame.

    Raises:
        SetupError: it is not.
    """
    found: dict[str, Any] = {"status": "finished", "stacks": outcome.stacks or None}
    primary, hang = outcome.primary, outcome.hang
    if outcome.timed_out:
        found["status"] = "timeout"
        found["collectives"] = hang.table() or None if hang else None
        seen = f"{what}; {hang.sentence}; {outcome.places()}" if hang else f"{what}; {outcome.places()}"
        if cut:
            return found | {"verdict": "inconclusive", "evidence": f"the run's budget ended first ({seen})"}
        if hang and hang.cause == "slow":
            return found | {"verdict": "inconclusive", "evidence": seen}
        guesses = (HANG,) if hang is None or hang.cause in OF_COLLECTIVES else ()
        return found | {"verdict": "hang", "evidence": seen, "guesses": guesses}
    for rank, error in outcome.failures.items():
        if error.phase == "save" or disk_full(error):
            raise SetupError(f"rank {rank} cannot write to {directory}: {first_line(error.message)}")
    for rank, death in outcome.deaths.items():
        if outcome.last.get(rank) == "save" and not death.startswith(BY_SOMEBODY):
            raise SetupError(f"rank {rank} {death} while it wrote to {directory}")
    try:
        check_writable(directory)
    except OSError as full:  # whatever the ranks died of: their logs cannot tell, and the target is not to blame
        raise unwritable(directory, full) from None
    if outcome.refused and primary:
        _, error = primary
        refusal = f"{error.type}: {paragraph(error.message)} ({error.where})"
        if late := changed(outcome):
            finding = records.Finding(oracle="refusal", flagged=True, evidence=late)
            more = {"oracle": finding.oracle, "findings": (finding,), "evidence": f"{refusal}; {late}"}
            return found | {"verdict": "refused", **more}
        return found | {"verdict": "refused", "evidence": refusal}
    deferred = [f for f in outcome.failures.values() if f.refusal and "forward" in f.phase]
    if len(deferred) == len(outcome.phases):
        first = deferred[0]
        told = f"refused only in {first.phase!r}, after the model was built: {first.type}: {paragraph(first.message)}"
        finding = records.Finding(oracle="refusal", flagged=True, evidence=f"{told} ({first.where})")
        return found | {"verdict": "crash", "oracle": "refusal", "findings": (finding,), "evidence": finding.evidence}
    if tie := broken_tie_of(case, outcome):
        evidence = f"{tie.evidence}; then {cause(outcome)}"
        found |= {"verdict": "bug", "oracle": tie.oracle, "findings": (tie,), "evidence": evidence}
        return found | {"guesses": (BY_REPLACEMENT if "'sharded'" in tie.evidence else LOST,)}
    if hang and (difference := parted(outcome)):
        evidence = f"{cause(outcome)}; {difference.sentence}"
        return found | {"verdict": "crash", "evidence": evidence, "collectives": hang.table(), "guesses": (HANG,)}
    return found | {"verdict": "crash", "evidence": cause(outcome)}


def changed(outcome: Outcome) -> str:
    """What a refusal left changed of the user's model, which must not be used any more then; empty where nothing."""
    for rank, failed in sorted(outcome.failures.items()):
        if parts := failed.changed:
            more = f" and {len(parts) - MOST_PARTS} more" if len(parts) > MOST_PARTS else ""
            return f"refused after the model was changed: on rank {rank} {', '.join(parts[:MOST_PARTS])}{more}"
    return ""


def unwritable(directory: Path, error: OSError) -> SetupError:
    """A run directory that cannot be written."""
    return SetupError(f"cannot write to {directory}: {error.strerror or error}")


def broken_tie_of(case: Case, outcome: Outcome) -> records.Finding | None:
    """The tie that was broken before the ranks crashed: the crash is its consequence, or hides it."""
    for rank, failed in sorted(outcome.failures.items()):
        if found := broken_tie(case, rank, [Lifecycle(*event) for event in failed.lifecycle]):
            return records.Finding(oracle="tie", flagged=True, evidence=found)
    return None


def parted(outcome: Outcome) -> hangs.Difference | None:
    """Where the ranks parted, if that explains their end: gloo ends processes whose calls do not fit together, and a
    rank that waits for a call of one that has finished hears that the connection is closed."""
    found = outcome.hang.first_difference if outcome.hang else None
    if found is None or (outcome.deaths and found.missing):  # the dead issue nothing
        return None
    own = outcome.primary is not None and not is_secondary(outcome.primary[1])
    return None if own else found


def cause(outcome: Outcome) -> str:
    """What went wrong first, then where the other ranks were."""
    alike = {(f.type, f.phase, f.message) for f in outcome.failures.values()}
    if outcome.primary and not (outcome.deaths and is_secondary(outcome.primary[1])):
        rank, failed = outcome.primary
        every = len(outcome.failures) == len(outcome.phases) > 1 and len(alike) == 1
        text = f"{'every rank' if every else f'rank {rank}'} raised {failed.type} in {failed.phase!r}: "
        text += f"{paragraph(failed.message)} ({failed.where})"
        named = set(outcome.phases) if every else {rank}
    else:  # a rank is gone, and what the others raised is that it is gone
        first = next(iter(outcome.deaths))
        text, named = f"rank {first} {outcome.phases[first]}", {first}
    rest = outcome.places(but=named)
    return f"{text}; {rest}"[: 2 * EVIDENCE_LIMIT] if rest else text


def with_leftovers(found: dict[str, Any], left: Sequence[str]) -> dict[str, Any]:
    """The fields of a record, its evidence with the processes that outlived their ranks."""
    return found | {"evidence": "; ".join([found["evidence"], *left])} if left else found


def disk_full(failed: ch.Failed) -> bool:
    """Whether a rank failed since there is no room for what it writes."""
    codes = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return failed.type == "OSError" and any(f"[Errno {code}]" in failed.message for code in codes)


def annotated(record: Record) -> Record:
    """The record with what its verdict does not say: a fault that nobody saw, a limit that was not kept."""
    notes = []
    if record.fault and not record.harmless and record.verdict in records.GREEN:
        notes.append(f"fault {record.fault} was not caught")
    if record.status == "finished" and records.over_budget(record):
        judging = f", {record.judge_seconds:.1f} s of it judging" if record.judge_seconds else ""
        notes.append(f"took {record.wall_seconds:.1f} s{judging}: over its limit of {record.budget_seconds:.0f} s")
    if notes:
        record = msgspec.structs.replace(record, evidence="; ".join(filter(None, [*notes, record.evidence])))
    return record


def foreseen(record: Record) -> Record:
    """The record with what the suite's tables say of its case and build, if they say anything.

    Runs with a patch or a fault are none that a table speaks of.
    """
    if record.patch or record.fault or record.status not in ("finished", "timeout"):
        return record
    case, version = Case.parse(record.case), version_of(record.target)
    found = expectations.concerning(case, version)
    if not found:
        return record
    flagged = [finding.oracle for finding in record.findings if finding.flagged]
    met = next((e for e in found if e.foresees(record.verdict, flagged, record.evidence)), None)
    entry, note = met or found[0], ""
    if met is None and record.verdict in records.GREEN:
        if not all(e.always for e in found):
            return record
        note = f"{entry.kind} {entry.name} no longer holds in {record.target}: give its versions an upper bound there"
    elif met is None:
        note = f"not what {entry.kind} {entry.name} foresees ({' or '.join(entry.verdicts)})"
    told = records.Expectation(
        kind=entry.kind,
        name=entry.name,
        why=entry.why,
        link=entry.link,
        since=entry.since,
        met=met is not None,
        note=note,
    )
    evidence = "; ".join(filter(None, [note, record.evidence]))
    return msgspec.structs.replace(record, expectation=told, evidence=evidence)


def version_of(target: str) -> str:
    """Version in a build's label, ``deepspeed==0.19.8 (1a2b3c)``; empty where it has none."""
    found = re.search(r"==([^\s()]+)", target)
    return found[1] if found else ""


def first_line(text: str) -> str:
    """First line of a message."""
    return (text.strip().splitlines() or [""])[0][:EVIDENCE_LIMIT]


def paragraph(text: str) -> str:
    """First paragraph of a message, on one line."""
    paragraph = re.split(r"\n\s*\n", text.strip())[0]
    line = " ".join(paragraph.split())
    return line if len(line) <= EVIDENCE_LIMIT else line[:EVIDENCE_LIMIT] + " …"


def patch_line(trace: str, name: str) -> str | None:
    """Line of a patch file at which a traceback ends."""
    found = re.findall(rf'File "{re.escape(name)}", line (\d+)', trace)
    return found[-1] if found else None
