"""Disks that are full, folders that may not be written or read, and two commands that write the same folder.

What is refused is refused with one line, whose advice is followed, and then the run ends with the bits of an undisturbed one.
"""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
import time
from pathlib import Path
from random import Random

from flipgrad.training import RunFolder
from torture.attack import Attack, FaultError, Outcome
from torture.calls import Answer
from torture.folders import GONE_ON, LONG, SEARCH, STOPPED, complete, in_second_epoch, killed_when
from torture.runs import Forked, difference
from torture.samples import mnist_files, store

# The runs that a full disk stops, by name.
RUNS = {"plain": LONG, "search": SEARCH}


class FullDiskAttack(Attack):
    """Every write of a run in turn is the first one that fails, and all later ones do, too."""

    part, name, title = "disk", "disk-full", "full disk, at every write in turn"
    limit = 200.0

    def __init__(self, full: int, seconds: float) -> None:
        self.full, self.seconds = full, seconds

    def setup(self, shared: Path) -> None:
        for name, arguments in RUNS.items():
            ended = complete([*arguments, "--output", str(shared / name)], shared / name, draw=True)
            (shared / f"{name}.json").write_text(json.dumps(ended.told))

    def attempt(self, number: int, random: Random) -> Outcome:
        name, at_once = list(RUNS)[number % 2], number // 2 % 2 == 0
        events = json.loads((self.shared / f"{name}.json").read_text())
        # In steps, so that a short campaign is spread over the whole run, and a full one has tried every event.
        first = 1 + (number // 4 * (7 if events % 7 else 11)) % events
        room = random.choice([0, 1, 100, 2000])
        run = self.scratch / f"run-{number}"
        told: list[str] = []

        def watch(event: int, what: str) -> None:
            told.append(what)
            if event < first:
                return
            if not at_once:
                # What is longer is cut off in its writing.
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            elif what.startswith(("open", "os.mkdir")):
                raise OSError(errno.ENOSPC, "No space left on device")

        begin = [*RUNS[name], "--output", str(run)]
        where = f"a full disk from event {first} of {events} on, {'at opening' if at_once else f'after {room} bytes'}, {name}"
        try:
            ended = Forked(begin, run, watch, draw=True).end()
            if ended.code < 0:
                raise FaultError("crash", f"{where}: signal {-ended.code}")
            ended.answer.check(where)
            if ended.answer.refused:
                run = follow(ended.answer, begin, run, where)
            if fault := difference(run, self.shared / name):
                raise FaultError("difference", f"{where}: {fault}; {ended.answer.error:.300}")
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir()
        return Outcome(refused=int(ended.answer.refused))


def follow(answer: Answer, begin: list[str], run: Path, where: str) -> Path:
    """Do what a refusal advises, now that there is room; the folder of the run that has then ended."""
    advice = answer.error
    if f"--resume {run}" in advice:
        command = ["train", "--resume", str(run)]
    elif "--overwrite" in advice:
        command = [*begin, "--overwrite"]
    elif "give the same command again" in advice:
        command = begin
    elif "another --output" in advice:
        run = run.with_name(f"{run.name}-elsewhere")
        command = [*begin[:-1], str(run)]
    else:
        raise FaultError("message", f"{where}: no advice: {advice:.300}")
    again = Forked(command, run).end().answer
    again.check(f"{where}, as advised")
    if again.refused:
        raise FaultError("message", f"{where}: advised {advice!r:.200}, which answers {again.error!r:.200}")
    return run


class PermissionAttack(Attack):
    """Folders and files that this user may not write or read."""

    part, name, title = "disk", "disk-permission", "read-only and unreadable files"
    limit = 200.0
    KINDS = ("parent", "resume", "evaluate", RunFolder.CONFIG, RunFolder.CHECKPOINT, RunFolder.WEIGHTS, "data")

    def __init__(self, full: int, seconds: float) -> None:
        self.full, self.seconds = full, seconds

    def setup(self, shared: Path) -> None:
        killed_when(in_second_epoch, LONG, shared / STOPPED)
        shutil.copytree(shared / STOPPED, shared / GONE_ON)
        complete(["train", "--resume", str(shared / GONE_ON)], shared / GONE_ON)

    def attempt(self, number: int, random: Random) -> Outcome:
        kind = self.KINDS[number % len(self.KINDS)]
        outer = self.scratch / f"outer-{number}"
        run = outer / "run"
        shutil.copytree(self.shared / STOPPED, run)
        store(outer / "mnist", mnist_files(zipped=False))
        closed, command = self._case(kind, outer, run)
        mode = closed.stat().st_mode
        closed.chmod(0o500 if closed.is_dir() else 0)
        try:
            first = Forked(command, run, ordinary=True).end().answer
            closed.chmod(mode)
            first.check(f"closed: {kind}")
            if not first.refused:
                raise FaultError("difference", f"closed: {kind}: accepted")
            again = Forked(command, run, ordinary=True).end().answer
            again.check(f"open again: {kind}")
            if again.refused and kind != "data":
                raise FaultError("message", f"{kind}: open again, and still refused: {again.error:.300}")
            if "--resume" in command and (fault := difference(run, self.shared / GONE_ON)):
                raise FaultError("difference", f"{kind}: {fault}")
        finally:
            closed.chmod(mode)
            shutil.rmtree(outer, ignore_errors=True)
        return Outcome(refused=1)

    def _case(self, kind: str, outer: Path, run: Path) -> tuple[Path, list[str]]:
        """What is closed, and the command that needs it."""
        resume = ["train", "--resume", str(run)]
        if kind == "parent":
            return outer, [*LONG, "--output", str(outer / "new")]
        if kind == "data":
            command = ["train", "--data", "mnist", "--data-folder", str(outer / "mnist"), "--output", str(outer / "new")]
            return outer / "mnist" / "train-images-idx3-ubyte", [*command, "--epochs", "1", "--model", "2"]
        if kind in ("resume", "evaluate"):
            return run, resume if kind == "resume" else ["evaluate", str(run)]
        return run / kind, ["evaluate", str(run)] if kind == RunFolder.WEIGHTS else resume


class WritersAttack(Attack):
    """Two commands that write the same folder at the same time."""

    part, name, title = "disk", "two-writers", "two writers of one folder"
    limit = 200.0
    KINDS = ("new", "overwrite", "resume", "killed")

    def __init__(self, full: int, seconds: float) -> None:
        self.full, self.seconds = full, seconds

    def setup(self, shared: Path) -> None:
        ended = complete([*LONG, "--output", str(shared / "whole")], shared / "whole")
        (shared / "seconds.json").write_text(json.dumps(ended.seconds))
        killed_when(in_second_epoch, LONG, shared / STOPPED)

    def attempt(self, number: int, random: Random) -> Outcome:
        kind = self.KINDS[number % len(self.KINDS)]
        run = self.scratch / f"run-{number}"
        begin = [*LONG, "--output", str(run)]
        first, second = begin, [*begin, "--overwrite"] if kind in ("overwrite", "killed") else begin
        if kind == "resume":
            shutil.copytree(self.shared / STOPPED, run)
            first = second = ["train", "--resume", str(run)]
        delay = random.choice([0.0, random.uniform(0, json.loads((self.shared / "seconds.json").read_text()))])
        try:
            one = Forked(first, run)
            time.sleep(delay)
            if kind == "killed":
                one.kill()
                if one.end().code != -signal.SIGKILL:
                    delay = -1.0
            two = Forked(second, run).end().answer
            answers = [two] if kind == "killed" else [one.end().answer, two]
            self._judge(kind, answers, f"{kind}, {delay:.3f} seconds apart")
            if fault := difference(run, self.shared / "whole"):
                raise FaultError("difference", f"{kind}, {delay:.3f} seconds apart: {fault}")
        finally:
            shutil.rmtree(run, ignore_errors=True)
        return Outcome(refused=sum(answer.refused for answer in answers))

    def _judge(self, kind: str, answers: list[Answer], where: str) -> None:
        for answer in answers:
            answer.check(where)
        done = sum(answer.code == 0 for answer in answers)
        if done == 0:
            raise FaultError("difference", f"{where}: both are refused: {[answer.error for answer in answers]}")
        if kind == "new" and done > 1:
            raise FaultError("difference", f"{where}: both have written")
