"""The campaign can find what it looks for, and a short one finds nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flipgrad.data import Split, mnist
from flipgrad.errors import InputError
from torture import operators
from torture.attack import Attack, FaultError, Outcome, source
from torture.attacks import ATTACKS
from torture.calls import Answer, call
from torture.campaign import Campaign, expected_seconds, planned
from torture.commands import command, options
from torture.damage import damaged, hostile_json
from torture.disk import follow
from torture.folders import unchanged
from torture.kills import NAMES, KillAttack, drawn_options
from torture.operators import SumAttack
from torture.readers import FORMATS, ReaderAttack, few_records
from torture.samples import mnist_files, store
from torture.table import Row, markdown, rich_table

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_short_campaign_finds_nothing():
    """One configuration that is killed five times, 170 inputs, a full disk, closed files, two writers."""
    command = [sys.executable, "-m", "torture", "--minutes", "0.1", "--parts", "inputs,disk,kill-fork"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout


def test_it_lasts_about_an_hour_and_is_large_enough():
    rows = [Row(attack, planned(attack, 60)) for attack in ATTACKS]
    assert 30 * 60 < expected_seconds(rows, 2) < 65 * 60
    inputs = sum(row.planned for row in rows if row.attack.part == "inputs")
    assert inputs >= 100_000
    kills = sum(attack.full * attack.each for attack in ATTACKS if isinstance(attack, KillAttack))
    assert kills >= 200
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


class Odd(Attack):
    """Attempts that end in every way there is."""

    part, name, title, full, seconds, limit = "odd", "odd", "odd ends", 6, 5.0, 1.0

    def attempt(self, number: int, random: random.Random) -> Outcome:
        match number:
            case 1:
                raise FaultError("difference", "other bits")
            case 2:
                raise KeyError("nobody caught it")
            case 3:
                os.kill(os.getpid(), signal.SIGSEGV)
            case 4:
                time.sleep(60)
        return Outcome(refused=1)


# Since Python 3.12 a fork of a process with threads, which pytest may be, is warned of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_crashes_hangs_and_tracebacks_are_counted_and_the_others_go_on():
    row, told = Row(Odd(), 6), []
    Campaign([row], seed=0, workers=2, found=told.append).run()
    assert (row.done, row.refused) == (6, 2)
    found = {finding.number: (finding.kind, finding.text) for finding in told}
    assert found[1] == ("difference", "other bits")
    assert found[2][0] == "traceback"
    assert "KeyError: 'nobody caught it'" in found[2][1]
    assert found[3][0] == "crash"
    assert "SIGSEGV" in found[3][1]
    assert found[4][0] == "hang"
    assert len(found) == 4
    page = markdown([row], seed=0, minutes=1, command="x", seconds=1, date="today", workers=2)
    assert "| odd ends | 6 | 2 | 1 | 1 | 1 | 1 | 0 |" in page
    assert "`odd:3` crash" in page
    console = Console(width=200)
    with console.capture() as printed:
        console.print(rich_table([row]))
    assert "odd ends" in printed.get()


class Fake(KillAttack):
    """Runs that are nothing but files."""

    name, title = "fake", "fake"

    def __init__(self, scratch, *, resumed=b"bits", lost=False):
        super().__init__(kills=2, each=2, seconds=1)
        self.scratch, self._resumed, self._lost = scratch, resumed, lost

    def _write(self, run, bits):
        run.mkdir(exist_ok=True)
        (run / "weights.safetensors").write_bytes(bits)
        (run / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "seconds": time.monotonic()}) + "\n")
        (run / "summary.json").write_text("{}")

    def undisturbed(self, arguments, run):
        if "--resume" in arguments and self._lost:
            return Answer(2, "", "flipgrad: there is nothing to go on with; begin anew\n")
        self._write(run, self._resumed if "--resume" in arguments else b"bits")
        return Answer(0, "", "")

    def killed(self, arguments, run, random):
        run.mkdir(exist_ok=True)
        (run / "checkpoint.safetensors").write_bytes(b"something")
        return True


def test_other_bits_after_a_kill_and_lost_checkpoints_are_found(tmp_path):
    assert Fake(tmp_path).attempt(0, random.Random(0)).faults == []
    assert Fake(tmp_path).attempt(0, random.Random(0)).tried >= 2
    (kind, text), *_ = Fake(tmp_path, resumed=b"bats").attempt(0, random.Random(0)).faults
    assert (kind, text[:13]) == ("difference", "other weights")
    (kind, text), *_ = Fake(tmp_path, lost=True).attempt(0, random.Random(0)).faults
    assert kind == "difference"
    assert "is lost" in text


def test_kills_take_all_estimators_norms_precisions_and_draws_in_turn():
    runs = [drawn_options(number, random.Random(0)) for number in range(len(NAMES))]
    words = {word for run in runs for word in run}
    assert {*NAMES, "none", "batch", "affine", "bfloat16", "float32", "antithetic", "bound", "auto", "adam", "sgd"} <= words
    assert {("--weights" in run, "--weight-noise" in run) for run in runs} == {(False, False), (True, False), (True, True)}


def attempts(attack: Attack, tmp_path: Path, count: int) -> list[str]:
    """The kinds of what some attempts in this process find."""
    tmp_path.mkdir(exist_ok=True)
    attack.prepare(tmp_path / "shared", tmp_path)
    found = []
    for number in range(count):
        try:
            attack.attempt(number, source(0, attack.name, number))
        except FaultError as fault:
            found.append(fault.kind)
    return found


def test_a_reader_that_takes_damage_for_data_is_found(tmp_path, monkeypatch):
    whole = mnist(store(tmp_path / "whole", mnist_files(zipped=True)))
    other = replace(whole, train=Split(-whole.train.x, whole.train.y))

    def careless(folder):
        try:
            return mnist(folder)
        except InputError:
            return other

    attack = ReaderAttack("mnist-gzip", 1, 1)
    assert attempts(attack, tmp_path / "right", 20) == []
    monkeypatch.setitem(FORMATS, "mnist-gzip", replace(FORMATS["mnist-gzip"], read=careless))
    assert "difference" in attempts(attack, tmp_path / "wrong", 20)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_an_operator_that_is_a_little_off_is_found(tmp_path, monkeypatch, factor):
    right = operators.compiled.flip_product
    monkeypatch.setattr(operators.compiled, "flip_product", lambda *arguments: factor * right(*arguments))
    monkeypatch.setattr(operators.library, "PORTABLE", operators.library.PORTABLE)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda yes: None)
    if not operators.library.available():
        pytest.skip(operators.library.reason())
    assert bool(attempts(SumAttack(1, 1), tmp_path, 60)) == (factor != 1)
    torch.set_num_threads(1)


def test_answers_are_judged():
    Answer(0, "done", "").check("x")
    Answer(2, "", "flipgrad: this is wrong, do that\n").check("x")
    for answer, kind in (
        (Answer(2, "", ""), "message"),
        (Answer(2, "", "flipgrad: one line\nand another\n"), "message"),
        (Answer(1, "", "", trace="Traceback\n  File a, line 1\nKeyError: 'x'"), "traceback"),
        (Answer(77, "", ""), "message"),
    ):
        with pytest.raises(FaultError) as found:
            answer.check("x")
        assert found.value.kind == kind


# A command whose time is up may be in a function that nobody can hear of an error from.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_commands_are_of_all_options_and_are_called_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = [command(random.Random(number)) for number in range(3000)]
    for name, parameters in options().items():
        given = {word for words in commands if words and words[0] == name for word in words}
        assert {p.opts[0] for p in parameters if p.opts[0].startswith("--") and p.opts[0] != "--help"} <= given, name
    assert call(["train", "--data", "nowhere"]).code == 2
    assert call(["estimators"]).code == 0
    assert call(["train", "--epochs", "100000", "--output", "run"], limit=0.5).code is None


def test_damage_is_damage_and_the_same_for_a_seed():
    content = b"0123456789" * 20
    for number in range(300):
        assert damaged(content, random.Random(number)) != content
        assert damaged(content, random.Random(number)) == damaged(content, random.Random(number))
    values = {repr(hostile_json({"a": [1, 2], "b": "x"}, random.Random(number))) for number in range(100)}
    assert len(values) > 50


def test_advice_that_does_not_help_and_files_that_were_changed_are_found(tmp_path):
    with pytest.raises(FaultError, match="no advice"):
        follow(Answer(1, "", "flipgrad: the disk is full\n"), ["train"], tmp_path, "x")
    (tmp_path / "a").write_bytes(b"new")
    unchanged({"a": b"new"}, tmp_path, "x")
    with pytest.raises(FaultError, match="a was changed"):
        unchanged({"a": b"old"}, tmp_path, "x")


def test_formats_are_read_undamaged(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["flipgrad.data.cifar10"], "RECORDS", 0)
    few_records()
    for name, kind in FORMATS.items():
        store(tmp_path / name, kind.files)
        assert len(kind.read(tmp_path / name).train)
