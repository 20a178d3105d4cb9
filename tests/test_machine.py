"""Threads are given back, the load is known, and the fastest run of each of several works is found."""

from __future__ import annotations

import pytest
import torch

from flipgrad.machine import cores, fastest, load, threads


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="no number"), threads(before + 1):
        int("no number")
    assert torch.get_num_threads() == before


def test_the_load_is_that_of_the_last_minute_where_the_system_tells(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 2.5, 3.5))
    assert load() == 1.5

    def unknown():
        raise OSError("not here")

    monkeypatch.setattr("os.getloadavg", unknown)
    assert load() is None


def test_works_take_turns_and_the_first_run_does_not_count():
    now, order, told = 0.0, [], []
    seconds = {"one": [1.0, 5.0, 3.0, 4.0], "two": [9.0, 8.0, 7.0, 9.0]}

    def work(name: str) -> None:
        nonlocal now
        order.append(name)
        now += seconds[name][order.count(name) - 1]

    works = {name: lambda name=name: work(name) for name in seconds}
    assert fastest(works, repeats=3, clock=lambda: now, done=told.append) == {"one": 3.0, "two": 7.0}
    assert order == told == ["one", "two"] * 4


def test_there_is_a_core():
    assert cores() >= 1
