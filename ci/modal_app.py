"""Modal app `tiebench`: a plan in shards on rented GPUs, every night or by hand, with a report whatever is killed.

    modal deploy ci/modal_app.py                                      the night, by its schedule
    modal run ci/modal_app.py --plan smoke --gpu H100:4 --shards 2    now; exit code as of `tiebench run`
    modal volume get tiebench-runs RUN/report-01 runs/                the report

NOT RUN ON MODAL ITSELF: there was no account. The declarations and the functions' bodies were tested with the client
on one machine (ci/tests/test_modal.py); image build, GPUs, Volume and schedule were not. The output says so too.

Time limits nest, so that the innermost speaks first: case < shard budget (the supervisor's) < attempt (Modal's) < night
< 24 h. The report is never left to `finally`: a cancelled input raises `InputCancellation`, a BaseException, and a
stuck container is killed. So rows go to the Volume as they come, and the collector reads the Volume only: once at the
end of a night, and once more by a schedule of its own for nights whose end was killed.

Only this file imports modal.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import uuid
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import modal

from ci import plans, records, schedule, shards
from ci.exit_codes import USAGE
from ci.shards import Collected, Night, Store
from ci.subject import INSTALLED, version

UNTRIED = "note: this app was tested with Modal's client only, not on Modal itself"
MOUNT = "/tiebench-runs"
ROOT_VARIABLE = "TIEBENCH_RUNS"  # another place for the runs, where there is no Volume
VERSION_VARIABLE = "TIEBENCH_VERSION"  # with the commit, which a container cannot ask git for
LONGEST = 24 * 3600  # seconds that Modal lets any function run
MOST_GPUS = {  # modal.com/docs/guide/gpu: kind -> GPUs in one container
    **dict.fromkeys(("T4", "L4", "L40S", "A100", "A100-40GB", "A100-80GB", "RTX-PRO-6000"), 8),
    **dict.fromkeys(("H100", "H100!", "H200", "B200", "B200+"), 8),
    "A10": 4,
}


class ConfigError(Exception):
    """A setting that Modal would refuse late or not at all, in one line for people."""


class NotGreen(Exception):
    """The night is over and not as expected; marks the call as failed."""


@dataclass(frozen=True)
class Config:
    """All settings. Modal's client takes nonsense without a word, so they are checked here.

    Args:
        plan, shards: what a night runs, in how many containers at once.
        gpu: kind and count; cases that need more ranks than there are GPUs run on the container's CPU.
        cpu, memory_mib: of a shard's container.
        case_limit, startup_limit: seconds, of a case and of a set of ranks.
        shard_budget: seconds, of the supervisor for one attempt at a shard.
        attempt_timeout, container_startup: seconds, Modal's for one attempt, and for its container to come up.
        retries: further attempts at a shard that failed (preemptions do not count).
        night_timeout: seconds, Modal's for the function that waits for the shards.
        cron: when the night begins, UTC. collect_cron: when nights that were killed get their report.
    """

    app: str = "tiebench"
    volume: str = "tiebench-runs"
    plan: str = "nightly"
    shards: int = 4
    gpu: str = "H100:4"
    cpu: float = 8.0
    memory_mib: int = 32 * 1024
    case_limit: float = 120.0
    startup_limit: float = 300.0
    shard_budget: float = 2400.0
    attempt_timeout: int = 3600
    container_startup: int = 1200
    retries: int = 2
    retry_delay: float = 10.0
    night_timeout: int = 5 * 3600
    collect_timeout: int = 900
    cron: str = "17 2 * * *"
    collect_cron: str = "17 14 * * *"
    python: str = "3.12"

    def __post_init__(self) -> None:
        check_gpu(self.gpu)
        check_cron(self.cron)
        check_cron(self.collect_cron)
        check_plan(self.plan, self.shards)
        if not 0 <= self.retries <= 10:
            raise ConfigError(f"retries {self.retries}: 0 to 10")
        longest_attempt = self.container_startup + self.attempt_timeout + self.retry_delay
        for what, value, what_more, more in (
            ("case_limit", self.case_limit, "shard_budget", self.shard_budget),
            ("startup_limit", self.startup_limit, "shard_budget", self.shard_budget),
            # the supervisor ends within its budget, then judges, kills, writes and commits
            ("shard_budget + 300 s", self.shard_budget + 300, "attempt_timeout", self.attempt_timeout),
            (
                f"{self.retries + 1} attempts with start-up",
                (self.retries + 1) * longest_attempt,
                "night_timeout",
                self.night_timeout,
            ),
            ("night_timeout", self.night_timeout, "24 h", LONGEST),
            ("container_startup", self.container_startup, "24 h", LONGEST),
            ("collect_timeout", self.collect_timeout, "24 h", LONGEST),
        ):
            if not 0 < value <= more:
                raise ConfigError(f"{what} is {value:g} s and must be more than 0 and at most {what_more} ({more:g} s)")


def check_gpu(text: str) -> None:
    """Raise `ConfigError` unless `text` is KIND or KIND:COUNT as Modal offers them."""
    kind, colon, count = text.partition(":")
    if kind not in MOST_GPUS:
        raise ConfigError(f"GPU {text!r}: unknown kind {kind!r}; one of {', '.join(MOST_GPUS)}")
    if colon and not (count.isascii() and count.isdigit() and 1 <= int(count) <= MOST_GPUS[kind]):
        raise ConfigError(f"GPU {text!r}: {kind} comes in 1 to {MOST_GPUS[kind]} a container, as {kind}:COUNT")


def check_plan(name: str, count: int) -> None:
    """Raise `ConfigError` unless there is such a plan and it can be cut into so many shards."""
    if name not in plans.PLANS:
        raise ConfigError(f"unknown plan {name!r}; one of {', '.join(plans.PLANS)}")
    if not 1 <= count <= min(64, len(plans.PLANS[name].cases)):
        raise ConfigError(f"{count} shards: 1 to {min(64, len(plans.PLANS[name].cases))} for plan {name}")


_CRON: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")),
    ("day of the week", 0, 7, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")),
)


def check_cron(text: str) -> None:
    """Raise `ConfigError` unless `text` has five good cron fields."""
    fields = text.split()
    if len(fields) != len(_CRON):
        raise ConfigError(f"cron {text!r}: five fields are needed (minute hour day month weekday), not {len(fields)}")
    for field, (what, low, high, names) in zip(fields, _CRON, strict=True):
        for part in field.split(","):
            found = re.fullmatch(r"(\*|(\w+)(?:-(\w+))?)(?:/(\d+))?", part, re.ASCII)
            numbers = [_cron_number(word, low, names) for word in (found[2], found[3]) if word] if found else []
            good = found and all(n is not None and low <= n <= high for n in numbers)
            good = good and not (found and found[4] and not 1 <= int(found[4]) <= high)
            if not good or (len(numbers) == 2 and (numbers[0] or 0) > (numbers[1] or 0)):
                raise ConfigError(f"cron {text!r}: {part!r} is no {what} ({low}-{high}, *, a-b, */n)")


def _cron_number(word: str, low: int, names: tuple[str, ...]) -> int | None:
    if word.lower() in names:
        return names.index(word.lower()) + (1 if low == 1 else 0)
    return int(word) if word.isdigit() else None


CONFIG = Config()

# The image: the steps of ci/setup, with torch's CUDA build from the default index, and never a second torch: torch
# comes first and once; all else is pinned and installed without dependencies.
_REQUIREMENTS = "/tiebench/requirements.txt"
_PIP = "python -m pip install --no-cache-dir"
IMAGE_COMMANDS = (
    f"grep -E '^(pip|setuptools|wheel)==' {_REQUIREMENTS} | xargs {_PIP}",
    f"{_PIP} torch -c {_REQUIREMENTS}",
    f"grep -vE '^(pip|setuptools|wheel|torch|deepspeed)==' {_REQUIREMENTS} > /tiebench/rest.txt",
    f"{_PIP} --no-deps -r /tiebench/rest.txt",
    f"grep -E '^deepspeed==' {_REQUIREMENTS} | DS_BUILD_OPS=0 xargs {_PIP} --no-deps --no-build-isolation",
    'python -c "import torch; assert torch.version.cuda, torch.__version__"',
)
ROOMS = ("suites", "ci", "reports")
LEFT_OUT = ("**/__pycache__", "**/tests")  # of the rooms
_SOURCE = Path(__file__).resolve().parent.parent


def build_image(config: Config) -> modal.Image:
    """The image that all functions run in. Its layers are looked at when it is built, on the machine that deploys."""
    image = modal.Image.debian_slim(python_version=config.python).apt_install("git")
    if not modal.is_local():  # the image is there already, and the files it was made from are not
        return image
    image = image.add_local_file(_SOURCE / "requirements.txt", _REQUIREMENTS, copy=True)
    image = image.run_commands(*IMAGE_COMMANDS).env(
        {"DS_BUILD_OPS": "0", "PYTHONPATH": "/root", VERSION_VARIABLE: version()}
    )
    for room in ROOMS:  # reports has templates, which add_local_python_source would leave out
        image = image.add_local_dir(_SOURCE / room, f"/root/{room}", ignore=list(LEFT_OUT))
    return image


image = build_image(CONFIG)
volume = modal.Volume.from_name(CONFIG.volume, create_if_missing=True)
app = modal.App(CONFIG.app, image=image)


def store() -> Store:
    """The Volume in a container; else the directory that `TIEBENCH_RUNS` names, with nothing to commit to."""
    if modal.is_local():
        return Store(Path(os.environ.get(ROOT_VARIABLE, "runs/modal")))
    return Store(Path(MOUNT), volume.commit, volume.reload)


@app.function(
    gpu=CONFIG.gpu,
    cpu=CONFIG.cpu,
    memory=CONFIG.memory_mib,
    timeout=CONFIG.attempt_timeout,
    startup_timeout=CONFIG.container_startup,
    retries=modal.Retries(max_retries=CONFIG.retries, initial_delay=CONFIG.retry_delay, backoff_coefficient=1.0),
    volumes={MOUNT: volume},
    single_use_containers=True,  # no process, no GPU memory of an attempt before
)
def run_shard(index: int, run_id: str) -> dict[str, int | str]:
    """One attempt at shard `index` (from 1) of a night; goes on where earlier attempts were killed."""
    return shards.run_shard(store(), run_id, index)


@app.function(timeout=CONFIG.collect_timeout, volumes={MOUNT: volume}, retries=2)
def collect(run_id: str) -> tuple[int, str]:
    """Report on a night from what is on the Volume: exit code and text."""
    return describe(shards.collect(store(), run_id))


@app.function(timeout=CONFIG.night_timeout, volumes={MOUNT: volume})
def run_plan(plan: str, gpu: str, count: int, target: str) -> tuple[int, str]:
    """A whole plan in shards, then its report: exit code and text."""
    return coordinate(plan, gpu, count, target)


@app.function(timeout=CONFIG.night_timeout, volumes={MOUNT: volume}, schedule=modal.Cron(CONFIG.cron))
def nightly() -> None:
    """The night. Raises `NotGreen` after the report when not all is as expected."""
    code, text = coordinate(CONFIG.plan, CONFIG.gpu, CONFIG.shards, "")
    print(text)
    if code:
        raise NotGreen(text)


@app.function(timeout=CONFIG.collect_timeout, volumes={MOUNT: volume}, schedule=modal.Cron(CONFIG.collect_cron))
def collect_rest() -> None:
    """Report on nights whose own end was killed. Raises `NotGreen` if there was one: a night was killed, after all."""
    found = []
    for run_id in shards.uncollected(store()):
        try:
            found.append(describe(shards.collect(store(), run_id))[1])
        except records.LogError as error:
            found.append(f"{run_id}: {error}")
    if found:
        raise NotGreen("the end of these nights was killed:\n" + "\n".join(found))


def coordinate(plan: str, gpu: str, count: int, target: str) -> tuple[int, str]:
    """Begin a night, wait for its shards whatever becomes of them, and have it collected."""
    print(UNTRIED)
    where = store()
    where.reload()
    run_id = night_id(where, plan)
    shards.begin(where, run_id, plan_night(run_id, plan, gpu, count, target))
    print(f"{run_id}: {count} shards on {gpu}")
    try:
        attempt = run_shard.with_options(gpu=gpu)
        for result in attempt.map(range(1, count + 1), kwargs={"run_id": run_id}, return_exceptions=True):
            print(f"a shard failed: {type(result).__name__}: {result}" if isinstance(result, BaseException) else result)
    except Exception as error:  # noqa: BLE001 - whatever happened to the shards, what they left is reported
        print(f"waiting for the shards failed: {type(error).__name__}: {error}")
    return collect.remote(run_id)


def night_id(where: Store, plan: str) -> str:
    """Name of this call's night: the same one again when Modal runs a preempted call again."""
    call = re.sub(r"[^A-Za-z0-9]", "", modal.current_function_call_id() or uuid.uuid4().hex)[-12:]
    before = sorted(path.name for path in where.root.glob(f"*-{plan}-{call}"))
    return before[0] if before else f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{plan}-{call}"


def plan_night(run_id: str, plan: str, gpu: str, count: int, target: str) -> Night:
    """What a night is to do.

    Raises:
        ConfigError: a value that cannot be.
    """
    check_gpu(gpu)
    check_plan(plan, count)
    chosen = schedule.order(plans.PLANS[plan].cases)
    words = ["modal", "run", "ci/modal_app.py", "--plan", plan, "--gpu", gpu, "--shards", str(count)]
    options = ["--target", target] if target else []
    row = records.RunRow(
        schema=records.SCHEMA,
        run_id=run_id,
        plan=plan,
        cases=tuple(case.id for case in chosen),
        target=target or INSTALLED.target("deepspeed"),
        budget_seconds=CONFIG.shard_budget,  # the shards run at the same time
        started_at=records.now(),
        tiebench=os.environ.get(VERSION_VARIABLE) or version(),
        command=shlex.join([*words, *options]),
        options=shlex.join(options),
    )
    return Night(
        run=row,
        shards=count,
        target=target or None,
        seconds=float(CONFIG.night_timeout),
        shard_budget=CONFIG.shard_budget,
        case_limit=CONFIG.case_limit,
        startup_limit=CONFIG.startup_limit,
        device="auto",
    )


def describe(done: Collected) -> tuple[int, str]:
    """Exit code and text for people: headline first, then every problem and where the report is."""
    where = f"{done.directory.parent.name}/{done.directory.name}"
    fetch = f"report: modal volume get {CONFIG.volume} {where} runs/"
    text = "\n".join([done.headline, *(f"note: {note}" for note in done.notes), fetch, UNTRIED])
    return done.exit_code, text


@app.local_entrypoint()
def main(plan: str = "smoke", gpu: str = CONFIG.gpu, shards: int = 1, target: str = "") -> None:
    """Run a plan now. Exit codes: 0 all as expected, 1 something failed or is missing, 2 usage."""
    try:
        check_gpu(gpu)
        check_plan(plan, shards)
    except ConfigError as error:
        print(f"tiebench: {error}", file=sys.stderr)
        sys.exit(USAGE)
    count = int(gpu.partition(":")[2] or 1)
    larger = sum(case.world_size > count for case in plans.PLANS[plan].cases)
    if larger:
        print(f"note: {larger} cases need more than {count} GPUs and run on the container's CPU")
    code, text = run_plan.remote(plan, gpu, shards, target)
    print(text)
    sys.exit(code)
