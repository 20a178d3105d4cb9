import importlib
import re
from html.parser import HTMLParser

import pytest
from run_files import config, epoch, evaluation, example, put, put_lines, write_evil_run, write_run

from flipgrad.errors import InputError
from flipgrad.plots import report
from flipgrad.plots.report import best_epoch
from flipgrad.plots.runs import Epoch

VOID = {"meta", "link", "br", "img"}
# Shares of units and of weights.
BY_LAYER = ("saturated", "changed_signs", "undecided")


class Page(HTMLParser):
    """The elements of a page, checked to be properly nested, and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.open = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def tags(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]


def page(folder):
    path = report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text(encoding="utf-8"))


# In one process: they share what the fixture makes.
pytestmark = pytest.mark.xdist_group("report")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The page of a run with everything in it."""
    return report(write_run(tmp_path_factory.mktemp("run"))).read_text(encoding="utf-8")


def test_the_page_says_what_the_files_say(full):
    shown = Page(full)
    assert "PSA on digits" in shown.text
    assert "4 epochs 6.0 s of training 1,003 images per second seed 7" in shown.text
    assert (
        "On the test examples, averaging 4 samples classifies 96.17% correctly; a single sample 92.12%; the deterministic "
        "network, with every noise at its median, 95.33%. The expected loss of one sample is 0.2912, the marginal loss of 4 "
        "samples 0.1632."
    ) in shown.text
    assert "last epoch (4) best epoch (3) validation test" in shown.text
    assert "accuracy, ensemble 93.17% 94.17% 95.17% 96.17%" in shown.text
    assert "training objective 0.5000 0.6667 – –" in shown.text
    assert "net.widths [5, 5]" in shown.text
    assert "flipgrad train --data 'my digits'" in shown.text
    assert "torch 2.13" in shown.text
    assert "cores 2" in shown.text
    assert "Where all 4 members agree (81 predictions), 1.2% are wrong; of the other 19, 47.4% are." in shown.text
    assert "Drawn at random one ✓ correct one 55% zero 30% two 15% 3 of 4 members say one" in re.sub(r" #\d+", "", shown.text)
    assert "✗ is zero" in shown.text
    assert "Least certain of the rest" in shown.text
    assert "1 sample (ECE 12.00%) 4 samples (ECE 3.10%) deterministic (ECE 20.00%)" in shown.text
    assert "flipgrad evaluate with the folder" not in shown.text
    assert "What do more samples buy? From 1 to 8 samples the accuracy goes from 92.00% to 96.50%" in shown.text


def test_every_curve_is_there_with_words_for_who_cannot_see_it(full):
    shown = Page(full)
    assert [figure["id"] for figure in shown.tags("figure")] == [
        "losses",
        "accuracies",
        "gradients",
        "saturated",
        "changed",
        "undecided",
        "rate",
        "reliability",
        "sizes-accuracy",
        "sizes-loss",
        "disagreement",
    ]
    words = [box["aria-label"] for box in shown.tags("div") if box.get("role") == "img"]
    assert words[1].startswith("Accuracies, epochs 1 to 4: 1 sample from 88.12% to 89.12%; 10 samples from 92.17% to 93.17%")
    assert "head from 3.0000 to 0.7500" in words[2]
    assert words[7].startswith("With 1 sample the expected calibration error is 12.00%; on average, confidence is 10.20% above")
    assert (
        words[8]
        == words[9]
        == "From 1 to 8 samples the accuracy goes from 92.00% to 96.50% (+4.50%), the loss from 0.29 to 0.16."
    )
    assert "from 25%: 8 correct, 3 wrong" in words[10]
    assert all(image["alt"] for image in shown.tags("img"))
    assert len(shown.tags("img")) == 3
    bars = [picture["aria-label"] for picture in shown.tags("svg") if picture.get("role") == "img"]
    assert "one: mean 55%, members 30% to 80%" in bars
    assert any(path.get("d", "").startswith("M30.0 0v10M") for path in shown.tags("path"))


def test_the_page_is_sound_html(full):
    assert full.startswith("<!DOCTYPE html>")
    shown = Page(full)
    assert shown.tags("html") == [{"lang": "en-GB"}]
    ids = [attributes["id"] for _, attributes in shown.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"][1:] for link in shown.tags("a")} <= set(ids)


def test_the_page_loads_and_runs_nothing(full):
    shown = Page(full)
    (policy,) = [meta["content"] for meta in shown.tags("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline';")
    assert not {"script", "iframe", "object", "embed", "form"} & {tag for tag, _ in shown.elements}
    for _, attributes in shown.elements:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not re.search(r"https?:|@import|url\((?!#)", full)


def test_the_same_files_give_the_same_bytes_wherever_they_are(tmp_path, full):
    assert report(write_run(tmp_path / "another")).read_text(encoding="utf-8") == full


def test_no_string_of_a_file_becomes_markup(tmp_path):
    shown = page(write_evil_run(tmp_path))
    assert "script" not in {tag for tag, _ in shown.elements}
    assert not [name for _, attributes in shown.elements for name in attributes if name.startswith("on")]
    assert all(image["src"].startswith("data:image/png") for image in shown.tags("img"))
    assert shown.text.count("<script>") > 10
    assert "{{ 7 * 7 }}" in shown.text


def test_what_is_missing_is_left_out(tmp_path):
    put(tmp_path / "config.json", {"config": {}})
    (tmp_path / "metrics.jsonl").write_text("")
    shown = page(tmp_path)
    assert "A stochastic binary network" in shown.text
    assert "No whole epoch was evaluated." in shown.text
    assert "flipgrad evaluate with the folder of this run adds calibration" in shown.text
    assert shown.tags("figure") == []
    assert [link["href"] for link in shown.tags("a")] == ["#configuration"]


@pytest.fixture
def _no_charts(monkeypatch):
    """For words alone: charts take most of a page's time."""
    monkeypatch.setattr(importlib.import_module("flipgrad.plots.report"), "charts", lambda epochs: [])


@pytest.mark.usefixtures("_no_charts")
@pytest.mark.parametrize(
    ("files", "start"),
    [
        (("summary.json", "evaluation.json"), "On the test examples, averaging 4 samples classifies 96.17%"),
        (("summary.json",), "At the end of training, averaging 10 samples classifies 93.17%"),
        ((), "After epoch 4, averaging 10 samples classifies 93.17%"),
    ],
)
def test_the_headline_takes_the_best_source_there_is(tmp_path, files, start):
    write_run(tmp_path)
    for name in {"summary.json", "evaluation.json"} - set(files):
        (tmp_path / name).unlink()
    assert start in page(tmp_path).text


@pytest.mark.usefixtures("_no_charts")
def test_a_part_other_than_test_counts_where_there_is_no_test(tmp_path):
    found = evaluation()
    del found["splits"]["test"]
    put(write_run(tmp_path) / "evaluation.json", found)
    assert "On the validation examples" in page(tmp_path).text


def test_an_ensemble_that_was_not_measured(tmp_path):
    put(write_run(tmp_path) / "evaluation.json", {"splits": {"test": {"expected_loss": 0.5}}})
    assert (
        "On the test examples, the accuracy of the ensemble was not measured. The expected loss of one sample is 0.5000."
        in (page(tmp_path).text)
    )


def test_a_run_of_one_epoch_and_few_numbers(tmp_path):
    write_run(tmp_path, evaluated=False)
    few = {key: value for key, value in epoch(1).items() if key not in ("lr", "gradient_norm", *BY_LAYER)}
    put_lines(tmp_path / "metrics.jsonl", [few | {"objective": 1.25}])
    shown = page(tmp_path)
    assert [figure["id"] for figure in shown.tags("figure")] == ["losses", "accuracies"]
    assert "1 epoch 1.5 s" in shown.text
    assert "training objective 1.2500" in shown.text
    assert "last, best epoch (1)" in shown.text


def test_points_are_drawn_among_the_others(tmp_path):
    found = evaluation() | {"examples": [example(i, image=None, point=[i, -i]) for i in range(3)]}
    put(write_run(tmp_path) / "evaluation.json", found)
    shown = page(tmp_path)
    assert shown.tags("img") == []
    assert len([circle for circle in shown.tags("circle") if circle["class"] == "others"]) == 9
    assert "(2, -2)" in shown.text


def test_the_best_epoch_is_the_first_of_the_highest():
    epochs = [Epoch(epoch=number, accuracy_n=value) for number, value in enumerate((0.5, None, 0.9, 0.9), 1)]
    assert best_epoch(epochs).epoch == 3
    assert best_epoch([Epoch(epoch=1)]) is None


def test_a_broken_file_is_named_and_the_earlier_page_stays(tmp_path):
    path = report(write_run(tmp_path))
    before = path.read_bytes()
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(InputError, match=r"evaluation\.json' is not JSON"):
        report(tmp_path)
    assert path.read_bytes() == before


def test_binary_weights_are_told_above_everything(tmp_path):
    folder = write_run(tmp_path / "run")
    assert "images per second seed 7" in page(folder).text
    stored = config()
    stored["config"]["weights"] = "binary"
    put(folder / "config.json", stored)
    assert "images per second binary weights seed 7" in page(folder).text


def test_the_page_says_which_examples_an_epoch_was_measured_on(tmp_path):
    folder = write_run(tmp_path / "run")
    assert "Scores of an epoch" not in page(folder).text
    for split, more in (("validation", "."), ("test", ", as none were held out for validation: good to look at, but nothing")):
        put_lines(folder / "metrics.jsonl", [epoch(1) | {"split": split}])
        assert f"Scores of an epoch are those of the {split} examples{more}" in page(folder).text


def test_the_page_has_the_confusions_and_says_on_how_many_examples(tmp_path):
    text = report(write_run(tmp_path / "run")).read_text(encoding="utf-8")
    assert "two taken for one (4), one taken for two (3), zero taken for one (2), one taken for zero (1)." in text
    assert '<td class="right">29</td><td class="error" style="--share: 65%">3</td>' in text
    assert "Measured on 100 test examples" in text
    # Wilson's interval of 96.17 % of 100.
    assert '<dd class="interval">95%: 90.4% to 98.5%</dd>' in text


def test_a_table_of_confusions_must_be_square(tmp_path):
    folder = write_run(tmp_path / "run")
    put(folder / "evaluation.json", evaluation() | {"confusion": [[1, 2], [3]]})
    with pytest.raises(InputError, match="'confusion' must have as many columns as rows"):
        report(folder)


def test_an_evaluation_without_confusions_is_shown_as_before(tmp_path):
    folder = write_run(tmp_path / "run")
    before = evaluation()
    del before["confusion"]
    put(folder / "evaluation.json", before)
    text = report(folder).read_text(encoding="utf-8")
    assert "Which classes are confused?" not in text
    assert "interval" not in text.partition("</style>")[2]
