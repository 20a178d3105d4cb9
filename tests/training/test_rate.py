import pytest
from problems import blobs, config, small_net

import flipgrad as fg
from flipgrad import files
from flipgrad.training import DivergenceError, RunFolder, Trainer, automatic_rate, read_trials
from flipgrad.training.search import Trial


def searched(**arguments):
    settings = config(lr="auto", search_trials=4, search_epochs=2, augment="none")
    return automatic_rate(settings, small_net, blobs(), **arguments)


def test_a_rate_is_found_by_training_from_the_first_weights():
    reports, stored = [], []
    result = searched(
        report=lambda done, total, trials: reports.append((done, total, len(trials))),
        trial_done=lambda trials: stored.append(list(trials)),
    )
    assert [len(trials) for trials in stored] == [1, 2, 3, 4]
    assert result.trials == tuple(stored[-1])
    assert result.rate == min(result.trials, key=lambda trial: trial.objective).rate
    # Rates that hardly change the weights all see the first loss; a good one gets lower.
    first = result.trials[0]
    assert first.rate < 1e-3
    assert result.objective < first.objective - 0.01
    # Two epochs of four updates.
    assert reports == [(done, 32, (done - 1) // 8) for done in range(1, 33)]


def test_an_interrupted_search_goes_on():
    whole = searched()
    kept = []

    def stop():
        stop.asked += 1
        return stop.asked == 20

    stop.asked = 0
    with pytest.raises(KeyboardInterrupt):
        searched(stop=stop, trial_done=lambda trials: kept.append(list(trials)))
    assert len(kept) == 2
    assert searched(done=kept[-1]) == whole


def test_trials_may_have_fewer_images():
    sizes = []
    settings = config(lr="auto", search_trials=2, search_epochs=1, search_images=20, augment="none")
    automatic_rate(settings, small_net, blobs(), report=lambda done, total, trials: sizes.append(total))
    assert set(sizes) == {4}
    with pytest.raises(fg.InputError, match="search_images is 41, and there are 40; give fewer, or leave it out"):
        automatic_rate(config(lr="auto", search_images=41), small_net, blobs())


def test_a_trial_that_diverges_counts_as_infinite(monkeypatch):
    update = Trainer.update

    def fragile(self):
        if self.config.rate > 1e-3:
            raise DivergenceError("too fast")
        update(self)

    monkeypatch.setattr(Trainer, "update", fragile)
    result = searched()
    assert any(trial.diverged for trial in result.trials)
    assert result.rate < 1e-3


def test_trials_are_stored_and_read(tmp_path):
    trials = [Trial(0.1, 2.0), Trial(0.5, float("inf"))]
    with RunFolder(tmp_path / "run") as folder:
        assert read_trials(tmp_path / "run", blobs()) == []
        folder.write_trials(trials, blobs())
    assert read_trials(tmp_path / "run", blobs()) == trials
    with pytest.raises(
        fg.InputError, match=r"search.json' is of a search on other data; put the data back as they were, or rem"
    ):
        read_trials(tmp_path / "run", blobs(62))
    for trials in (None, 3, [3], [{}]):
        files.write_json(tmp_path / "run/search.json", {"trials": trials, "data": blobs().fingerprint})
        with pytest.raises(fg.InputError, match=r"remove it|needs its 'rate'"):
            read_trials(tmp_path / "run", blobs())
    (tmp_path / "run/search.json").write_text("[")
    with pytest.raises(fg.InputError, match=r"search.json' is not JSON .*; remove it, and the search begins anew"):
        read_trials(tmp_path / "run", blobs())
