"""Runs that are killed at random instants and resumed, and must end with the bits of one that was never interrupted."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import ClassVar, final

from flipgrad.estimators import ESTIMATORS
from flipgrad.training import RunFolder
from flipgrad.training.lock import FolderLock
from torture.attack import Attack, FaultError, Outcome
from torture.calls import Answer
from torture.runs import Forked, difference, resume, tell_parent

KILLED = -signal.SIGKILL
NAMES = (*ESTIMATORS, "reinforce+running", "muprop+running", "psa:sampled", "psa:mean", "arms:4", "concrete:0.5", "st:mean")
NORMS = ("none", "batch", "affine")
PRECISIONS = ("float32", "float32", "bfloat16")
DRAWS = (
    (),
    ("--samples", "2"),
    ("--samples", "2", "--draws", "antithetic"),
    ("--samples", "3", "--objective", "bound"),
)
PROBLEMS = (
    ("--data", "digits", "--model", "6-6", "--batch-size", "200"),
    ("--data", "digits", "--width", "0.1", "--batch-size", "300"),
    ("--data", "toy", "--model", "4-4", "--batch-size", "30"),
)
# Of estimators that have a rule for binary weights, drawn or not.
WEIGHTS = ((), ("--weights", "binary", "--weight-noise", "logistic:0.1"), ("--weights", "binary"))
WITH_BINARY_WEIGHTS = ("psa", "st", "hard-st", "zgr", "concrete", "tanh")
SEARCH = ("--lr", "auto", "--search-trials", "3", "--search-epochs", "1", "--search-images", "60")


def descendants(process: int) -> list[int]:
    """The processes that a process started, and those that these did: torchrun's are in sessions of their own."""
    try:
        children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *itertools.chain.from_iterable(map(descendants, children))]


def kill(*processes: int) -> None:
    """End processes without a warning."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def drawn_options(number: int, random: Random) -> list[str]:
    """The options of a run; numbers in a row take all estimators, norms, precisions, draws, weights and optimizers in turn."""
    name = NAMES[number % len(NAMES)]
    options = [
        "--estimator",
        name,
        "--norm",
        NORMS[number % 3],
        "--precision",
        PRECISIONS[number // 2 % 3],
    ]
    options += [*PROBLEMS[(number + number // 3) % 3], *DRAWS[number // 3 % 4]]
    if name.partition(":")[0] in WITH_BINARY_WEIGHTS:
        options += WEIGHTS[number // 2 % 3]
    options += ["--optimizer", ("sgd", "adam")[number // 5 % 2], *(SEARCH if number % 4 == 1 else ())]
    options += ["--schedule", random.choice(["constant", "cosine", "step"]), "--eval-train", random.choice(["0", "20"])]
    options += ["--validation", random.choice(["0", "0.1"]), "--seed", str(random.randrange(1000))]
    return [*options, "--epochs", "3", "--eval-samples", "2", "--threads", "1", "--checkpoint-minutes", "1e-9"]


class KillAttack(Attack):
    """Kills of runs that are started in one way or another."""

    part = "kills"
    # Of a configuration, also on a busy machine.
    limit = 900.0

    def __init__(self, kills: int, each: int, seconds: float) -> None:
        """Args: how many kills; of how many in one configuration, whose undisturbed run is made once; seconds for these."""
        self.full, self.each, self.seconds = kills // each, each, seconds

    @abstractmethod
    def undisturbed(self, arguments: list[str], run: Path) -> Answer:
        """Run a command to its end."""

    @abstractmethod
    def killed(self, arguments: list[str], run: Path, random: Random) -> bool:
        """Start a command and kill it some time; whether it was still alive."""

    def attempt(self, number: int, random: Random) -> Outcome:
        for trial in itertools.count():
            options = drawn_options(number + 7 * trial, random)
            whole = self.scratch / f"whole-{number}-{trial}"
            answer = self.undisturbed(["train", *options, "--output", str(whole)], whole)
            answer.check(" ".join(options))
            # Not all options go together; others are tried then.
            if not answer.refused:
                break
        outcome = Outcome(tried=0)
        for story in itertools.count():
            if outcome.tried >= self.each or story >= 4 * self.each:
                break
            run = self.scratch / f"run-{number}-{story}"
            self._story(options, run, whole, random, outcome)
            shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(whole)
        return outcome

    def _story(self, options: list[str], run: Path, whole: Path, random: Random, outcome: Outcome) -> None:
        """One run that is killed once or a few times, and its end."""
        begin = ["train", *options, "--output", str(run)]
        arguments = begin
        for _ in range(random.choice([1, 1, 2, 3])):
            if not self.killed(arguments, run, random):
                break
            outcome.tried += 1
            arguments = resume(run)
        try:
            self._finish(begin, run)
            if fault := difference(run, whole):
                raise FaultError("difference", fault)
        except FaultError as fault:
            outcome.faults.append((fault.kind, f"{fault.text} ({' '.join(options)})"))

    def _finish(self, begin: list[str], run: Path) -> None:
        """Resume; what was killed before anything was stored is begun anew, as the refusal says."""
        before = sorted(path.name for path in run.iterdir()) if run.exists() else []
        answer = self.undisturbed(resume(run), run)
        answer.check("resume")
        if not answer.refused:
            return
        if RunFolder.CHECKPOINT in before or RunFolder.SEARCH in before:
            raise FaultError("difference", f"what was stored ({', '.join(before)}) is lost: {answer.error:.300}")
        anew = self.undisturbed([*begin, "--overwrite"], run)
        anew.check("anew")
        if anew.refused:
            raise FaultError("message", f"neither resumed nor begun anew: {answer.error:.200} {anew.error:.200}")


@final
class ForkedKills(KillAttack):
    """Children of this process: killed after a random time, or at a random event of a file, or just after one."""

    name, title = "kill-fork", "kill -9"

    def undisturbed(self, arguments: list[str], run: Path) -> Answer:
        ended = Forked(arguments, run, lambda number, what: tell_parent(number)).end()
        if ended.code < 0:
            raise FaultError("crash", f"signal {-ended.code}")
        if "--resume" not in arguments:
            self._seconds, self._events = ended.seconds, ended.told
        return ended.answer

    def killed(self, arguments: list[str], run: Path, random: Random) -> bool:
        at, how = random.randint(1, self._events + 5), random.random()
        if how < 0.4:
            process = Forked(arguments, run)
            process.told(random.uniform(0, 1.1 * self._seconds))
        else:

            def watch(number: int, what: str) -> None:
                if number == at and how < 0.7:
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == at:
                    tell_parent(number)

            process = Forked(arguments, run, watch)
            process.told(60)
            # Long enough for a file to be written, or half of it.
            time.sleep(random.choice([0, 1e-4, 1e-3, 5e-3]) * random.random())
        process.kill()
        return process.end().code == KILLED


class ProcessKills(KillAttack):
    """Processes as a user starts them, killed some time after they have begun to write."""

    prefix: ClassVar[tuple[str, ...]] = (sys.executable, "-m", "flipgrad")

    def undisturbed(self, arguments: list[str], run: Path) -> Answer:
        with self._started(arguments) as process:
            self._wait_for_lock(process, run, None)
            began = time.monotonic()
            try:
                out, error = process.communicate(timeout=150)
            except subprocess.TimeoutExpired:
                raise FaultError("hang", f"no end after 150 seconds: {arguments}") from None
        if "--resume" not in arguments:
            self._seconds = time.monotonic() - began
        # Of many processes torchrun has something to say, too: the line is the one of flipgrad.
        ours = [line for line in error.splitlines() if line.startswith("flipgrad: ")]
        code = process.returncode
        if ours and code and "Traceback" not in error.partition("flipgrad: ")[0]:
            return Answer(2, out, ours[0])
        # What torchrun says of a process that failed comes after the process's own last words: the first line of it will do.
        said, end, told = error.partition("failed (exitcode: ")
        return Answer(code, out, said + end + told.partition("\n")[0])

    def killed(self, arguments: list[str], run: Path, random: Random) -> bool:
        lock = run / FolderLock.NAME
        before = lock.stat().st_mtime_ns if lock.exists() else None
        with self._started(arguments) as process:
            if random.random() < 0.9:
                self._wait_for_lock(process, run, before)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(random.uniform(0, self._seconds))
            alive = process.poll() is None
            self.end(process, random)
            process.communicate()
        return alive

    def end(self, process: subprocess.Popen[str], random: Random) -> None:
        """Kill the process and all that it started."""
        kill(process.pid, *descendants(process.pid))

    @contextlib.contextmanager
    def _started(self, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [*self.prefix, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill(process.pid, *descendants(process.pid))
            process.wait()

    def _wait_for_lock(self, process: subprocess.Popen[str], run: Path, before: int | None) -> None:
        """Wait until the process has taken the folder."""
        lock = run / FolderLock.NAME
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                if lock.stat().st_mtime_ns != before:
                    return
            time.sleep(0.003)


@final
class PlainKills(ProcessKills):
    """One process; the undisturbed run is a child of this process, so that the two ways are compared as well."""

    name, title = "kill-process", "kill -9, processes of their own"

    def undisturbed(self, arguments: list[str], run: Path) -> Answer:
        if "--resume" in arguments or "--overwrite" in arguments:
            return super().undisturbed(arguments, run)
        ended = Forked(arguments, run).end()
        # Pictures are drawn in a process of its own, after all else.
        self._seconds = ended.seconds + 0.5
        return ended.answer


@final
class TorchrunKills(ProcessKills):
    """Two processes of torchrun: all of them are killed at once, or one of the two."""

    name, title, cores = "kill-torchrun", "kill -9, torchrun with two processes", 2
    prefix = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flipgrad")

    def end(self, process: subprocess.Popen[str], random: Random) -> None:
        workers = descendants(process.pid)
        if workers and random.random() < 0.5:
            kill(random.choice(workers))
            # torchrun tells the other one to end, which it may be too busy to hear.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        super().end(process, random)
