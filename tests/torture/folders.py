"""Damaged and hostile files in the folder of a run, which is then evaluated, resumed, or drawn.

Damage is noticed: what is accepted gives the result of the undamaged folder, to the bit. A file with hostile content and a
right checksum is one that somebody wrote: it works, or is refused with one line. A refusal leaves all files as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import safetensors
import torch

from flipgrad import files, plots, tensor_files
from flipgrad.errors import InputError
from flipgrad.training import Checkpoint, RunFolder
from flipgrad.training.lock import FolderLock
from torture.attack import ACCEPTED, REFUSED, Attack, FaultError, Outcome
from torture.calls import Answer, call
from torture.damage import damaged, hostile, hostile_json, json_bytes
from torture.runs import Ended, Forked, difference, tell_parent

TRAIN = ["train", "--data", "toy", "--model", "3", "--batch-size", "90", "--eval-samples", "1", "--checkpoint-minutes", "1e-9"]
LONG = [*TRAIN, "--epochs", "3"]
SEARCH = [*TRAIN, "--epochs", "1", "--lr", "auto", "--search-trials", "3", "--search-epochs", "1"]
# A run at its end, one in the middle, and one in its search for the learning rate; and the last two, gone on with undamaged.
FINISHED, STOPPED, SEARCHING, GONE_ON, SEARCHED = "finished", "stopped", "searching", "gone-on", "searched"
# The files that are damaged in each of them, and what is then done.
FILES = {
    FINISHED: (RunFolder.CONFIG, RunFolder.WEIGHTS, RunFolder.CHECKPOINT, RunFolder.SUMMARY, RunFolder.METRICS),
    STOPPED: (RunFolder.CONFIG, RunFolder.CHECKPOINT, RunFolder.METRICS, RunFolder.WEIGHTS, FolderLock.NAME),
    SEARCHING: (RunFolder.CONFIG, RunFolder.SEARCH),
}
JSON_FILES = (RunFolder.CONFIG, RunFolder.SUMMARY, RunFolder.SEARCH, RunFolder.EVALUATION)


def hostile_file(content: bytes, name: str, random: Random) -> bytes:
    """A file with hostile values and, mostly, a right checksum."""
    signed = random.random() < 0.9
    if name in JSON_FILES:
        value = hostile_json(json.loads(content), random)
        # A checksum is of what JSON can hold.
        if signed and isinstance(value, dict) and _plain(value):
            value = files.with_checksum(value)
        return json_bytes(value, random)
    if name == RunFolder.METRICS:
        lines = [json.loads(line) for line in content.splitlines()]
        which = random.randrange(len(lines))
        value = hostile_json(lines[which], random)
        lines[which] = files.with_checksum(value) if signed and isinstance(value, dict) and _plain(value) else value
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return damaged(content, random)


def hostile_tensors(path: Path, random: Random) -> bytes:
    """A file of tensors with a right checksum, of which something is not as it should be."""
    kind = json.loads(_header(path)[tensor_files.HEADER])["kind"]
    tensors, facts = tensor_files.read_tensors(path, kind, missing="", broken="")
    action = random.random()
    # What an optimizer lacks only its next step finds.
    name = random.choice([name for name in tensors if not name.startswith("optimizer.")])
    if action < 0.4 and facts:
        facts = hostile_json(facts, random)
        facts = facts if isinstance(facts, dict) and _plain(facts) else {"epoch": -1}
    elif action < 0.5:
        del tensors[name]
    elif action < 0.6:
        tensors[f"{name}.more"] = tensors[name]
    elif action < 0.7:
        tensors[name] = tensors[name].to(random.choice([torch.float16, torch.int64, torch.bool, torch.float64]))
    elif action < 0.85:
        name = random.choice(list(tensors))
        tensors[name] = random.choice([tensors[name].flatten()[:1], tensors[name][None], torch.zeros(0), torch.zeros(7, 7)])
    else:
        odd = random.choice([float("nan"), float("inf"), 1e30])
        tensors[name] = torch.full_like(tensors[name], odd) if tensors[name].is_floating_point() else tensors[name] - 1
    return tensor_files.tensors_to_bytes(kind if random.random() < 0.95 else "weights 99", tensors, facts)


def _header(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, framework="pt") as stored:
        metadata: dict[str, str] = stored.metadata()
        return metadata


def _plain(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def complete(arguments: list[str], run: Path, *, draw: bool = False) -> Ended:
    """Make a base run: a command that works."""
    ended = Forked(arguments, run, lambda number, what: tell_parent(number), draw=draw).end()
    ended.answer.check("the base run")
    if ended.code:
        raise FaultError("message", f"the base run: {ended.answer.error}")
    return ended


def killed_when(enough: Callable[[Path], bool], arguments: list[str], run: Path) -> None:
    """Make a run that ends by itself, without a warning, once it has stored enough."""

    def watch(number: int, what: str) -> None:
        if what.startswith("os.rename") and (run / RunFolder.CONFIG).exists() and enough(run):
            os.kill(os.getpid(), signal.SIGKILL)

    Forked([*arguments, "--output", str(run)], run, watch).end()


def in_second_epoch(run: Path) -> bool:
    """Whether the checkpoint is one after the first epoch."""
    file = run / RunFolder.CHECKPOINT
    return file.exists() and Checkpoint.read(file).facts["epoch"] == 1


class FolderAttack(Attack):
    """Damaged files of a run."""

    part, name, title = "inputs", "run-folders", "run folders: damaged files"
    limit = 60.0

    def __init__(self, full: int, seconds: float) -> None:
        self.full, self.seconds = full, seconds

    def setup(self, shared: Path) -> None:
        complete([*LONG, "--output", str(shared / FINISHED)], shared / FINISHED)
        complete(["evaluate", str(shared / FINISHED)], shared / FINISHED)
        # Killed in the second epoch, when its first checkpoint is there; and with one trial done.
        killed_when(in_second_epoch, LONG, shared / STOPPED)
        killed_when(lambda run: (run / RunFolder.SEARCH).exists(), SEARCH, shared / SEARCHING)
        for stopped, whole in ((STOPPED, GONE_ON), (SEARCHING, SEARCHED)):
            shutil.copytree(shared / stopped, shared / whole)
            complete(["train", "--resume", str(shared / whole)], shared / whole)

    def attempt(self, number: int, random: Random) -> Outcome:
        torch.set_num_threads(1)
        base = random.choice([FINISHED, STOPPED, STOPPED, SEARCHING])
        run = self.scratch / str(number)
        shutil.copytree(self.shared / base, run)
        name = random.choice(FILES[base])
        written = random.random() < 0.4
        file = run / name
        content = file.read_bytes() if file.exists() else b""
        if written and name in (RunFolder.WEIGHTS, RunFolder.CHECKPOINT):
            file.write_bytes(hostile_tensors(file, random))
        elif written:
            file.write_bytes(hostile_file(content, name, random))
        elif random.random() < 0.03:
            file.unlink(missing_ok=True)
            file.mkdir()
        else:
            file.write_bytes(damaged(content, random))
        what = f"{'hostile' if written else 'damaged'} {name} of a {base} run"
        try:
            return self._judged(base, run, name, what, random, written=written)
        finally:
            shutil.rmtree(run)

    def _judged(self, base: str, run: Path, name: str, what: str, random: Random, *, written: bool) -> Outcome:
        before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
        if base == FINISHED and random.random() < 0.05:
            return drawn(run, what)
        command = ["train", "--resume", str(run)]
        if base == FINISHED and random.random() < 0.7:
            command = ["evaluate", str(run)]
        answer = call(command, limit=4.0)
        answer.check(f"{what}, {command[0]}")
        if answer.refused:
            # A file in whose place there is a folder is found when it is to be written.
            if answer.code == 2 and "is a folder" not in answer.error:
                unchanged(before, run, what)
            return REFUSED
        if not written and answer.code == 0:
            self._same(base, run, name, answer, what)
        return ACCEPTED

    def _same(self, base: str, run: Path, name: str, answer: Answer, what: str) -> None:
        """Damage that was accepted has changed nothing."""
        whole = self.shared / {FINISHED: FINISHED, STOPPED: GONE_ON, SEARCHING: SEARCHED}[base]
        if (run / RunFolder.EVALUATION).exists() and base == FINISHED and "Numbers and examples" in answer.out:
            now, then = (json.loads((folder / RunFolder.EVALUATION).read_text())["splits"] for folder in (run, whole))
            if now != then:
                raise FaultError("difference", f"{what}: accepted by evaluate, with other numbers")
            return
        if fault := difference(run, whole):
            raise FaultError("difference", f"{what}: accepted by --resume, with {fault}")


def unchanged(before: dict[str, bytes], run: Path, what: str) -> None:
    """What is refused is left as it was, but for the lock and for the command that config.json tells of."""
    for name, content in before.items():
        if name not in (FolderLock.NAME, RunFolder.CONFIG) and (
            not (run / name).is_file() or (run / name).read_bytes() != content
        ):
            raise FaultError("difference", f"{what}: refused, and {name} was changed")


def drawn(run: Path, what: str) -> Outcome:
    """The page of a run, from damaged files."""
    try:
        plots.report(run)
    except InputError as error:
        if "\n" in str(error):
            raise FaultError("message", f"{what}, report: more than one line: {error}") from None
        return REFUSED
    return ACCEPTED


class NonsenseAttack(Attack):
    """Run folders whose files have nothing to do with a run."""

    part, name, title = "inputs", "run-folders-nonsense", "run folders: nonsense"
    limit = 60.0

    def __init__(self, full: int, seconds: float) -> None:
        self.full, self.seconds = full, seconds

    def attempt(self, number: int, random: Random) -> Outcome:
        torch.set_num_threads(1)
        run = self.scratch / str(number)
        run.mkdir()
        try:
            for name in {RunFolder.CONFIG, *random.choices(sum(FILES.values(), ()), k=3)}:
                value = {"config": hostile(random)} if random.random() < 0.5 else hostile(random)
                content = json_bytes(value, random) if random.random() < 0.5 else random.randbytes(random.choice([0, 9, 500]))
                (run / name).write_bytes(content)
            command = random.choice([["evaluate", str(run)], ["train", "--resume", str(run)]])
            answer = call(command, limit=4.0)
        finally:
            shutil.rmtree(run)
        answer.check(f"nonsense, {command[0]}")
        if not answer.refused:
            raise FaultError("difference", f"nonsense is accepted by {command[0]}: {answer.out:.100}")
        return REFUSED
