"""The site: its code runs, and the reference has every public name and every command."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch

import flipgrad
from flipgrad import cli
from flipgrad.plots.style import with_palette
from flipgrad.reproduce._workshop import as_text
from flipgrad.reproduce.experiments import rounded

DOCS = Path(__file__).parents[2] / "docs"
# What is generated, or holds results.
NOT_WRITTEN = {"build", "reference", "results", "tutorials"}
PAGES = sorted(page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in NOT_WRITTEN)
BLOCKS = [
    (page.relative_to(DOCS), number, code)
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL), 1)
]
LESSONS = sorted((DOCS / "lessons").glob("lesson_*.py"))
# What a lesson does many times it does a few times here.
FEW = {"EPOCHS": 1, "UPDATES": 25, "SAMPLES": 200}

# In one process: matplotlib's figures are shared.
pytestmark = pytest.mark.xdist_group("site")


@pytest.fixture(scope="module")
def site_pages():
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("page", "number", "code"), BLOCKS, ids=[f"{page}-{number}" for page, number, _ in BLOCKS])
def test_every_block_of_python_runs(page, number, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, f"{page}, block {number}", "exec"), {})


# Bytes of all results that are kept, the page included: they come with every clone.
LARGEST_RESULTS = 2_500_000


def test_the_results_that_are_kept_are_small_and_as_keep_writes_them():
    results = DOCS / "results"
    assert sum(path.stat().st_size for path in results.rglob("*") if path.is_file()) <= LARGEST_RESULTS
    advice = "flipgrad reproduce report --output docs/results --keep docs/results makes them so"
    for path in results.glob("*.png"):
        assert with_palette(path.read_bytes()) == path.read_bytes(), f"{path}: {advice}"
    for path in results.glob("measured/*.json"):
        stored = json.loads(path.read_text())
        stored.pop("checksum")
        assert rounded(stored) == stored, f"{path}: {advice}"
    for path in results.glob("*.json"):
        assert path.with_suffix(".md").read_text() == as_text(json.loads(path.read_text())), f"{path}: {advice}"


def test_there_are_eight_lessons():
    assert [int(lesson.stem.split("_")[1]) for lesson in LESSONS] == list(range(1, 9))


# Torch's tensors, as matplotlib asks for them.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.stem for lesson in LESSONS])
def test_every_lesson_runs(lesson, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = lesson.read_text(encoding="utf-8")
    for name, few in FEW.items():
        code = re.sub(rf"(?m)^{name} = \d+$", f"{name} = {few}", code)
    with mpl.rc_context({"backend": "agg"}):
        plt.switch_backend("agg")
        exec(compile(code, lesson.name, "exec"), {"__name__": "lesson"})
        plt.close("all")


def test_the_reference_has_every_public_name(site_pages):
    text = "\n".join(site_pages.reference().values())
    documented = set(re.findall(r"^\.\. (?:auto\w+|data):: flipgrad\.(\S+)$", text, re.MULTILINE))
    modules = [name for name in flipgrad.__all__ if name not in flipgrad._HOMES and name != "InputError"]
    missing = [name for name in flipgrad.__all__ if name not in documented]
    for module in {*modules, *site_pages.MODULES}:
        if site_pages.exists(module):
            names = site_pages.public_names(import_module(f"flipgrad.{module}"))
            missing += [f"{module}.{name}" for name in names if not {name, f"{module}.{name}"} & documented]
    assert missing == []


def test_names_inside_the_package_are_told_from_names_that_do_not_exist(site_pages):
    assert site_pages.is_inside("flipgrad.flips.heads")
    assert site_pages.is_inside("flipgrad.objectives.LinearHeadObjective.at_flips")
    assert site_pages.is_inside("LinearHeadObjective", "flipgrad.objectives")
    assert site_pages.is_inside("StorageError")
    for name in ("flipgrad.layers.Binary", "flipgrad.nothing.at.all", "LinearHeadObjective", "torch.nn.Linear"):
        assert not site_pages.is_inside(name), name


def test_docstrings_of_properties_have_no_colon_that_napoleon_takes_for_the_end_of_a_type(site_pages):
    for name in re.findall(r"^\.\. autoclass:: (\S+)$", "\n".join(site_pages.reference().values()), re.MULTILINE):
        for key, member in vars(attribute(name)).items():
            if isinstance(member, property) and not key.startswith("_"):
                assert ": " not in (member.__doc__ or "").partition("\n")[0], f"{name}.{key}"


def test_docstrings_of_the_reference_point_to_what_it_has(site_pages):
    """Sphinx warns of each that does not, but is not there in every environment."""
    pages = "\n".join(site_pages.reference().values())
    known = {*re.findall(r"^\.\. (?:auto\w+|data):: (flipgrad\S*)$", pages, re.MULTILINE)}
    texts = {}
    for name in sorted(known):
        found = attribute(name)
        texts[name] = (found.__doc__ or "", name)
        for key, member in vars(found).items() if isinstance(found, type) else ():
            texts[f"{name}.{key}"] = (getattr(member, "__doc__", None) or "" if not key.startswith("_") else "", name)
    known |= texts.keys()
    lost = []
    for name, (text, owner) in texts.items():
        places = ("", f"{owner}.", f"{owner.rpartition('.')[0]}.", "flipgrad.")
        for target in re.findall(r":(?:class|func|data|meth|attr|mod|exc):`(?:[^`<]*<)?[~!]?([^`>]+)>?`", text):
            found = any(place + target in known for place in places) or re.match(r"(torch|nn|numpy)\b", target)
            if not found and not site_pages.is_inside(target, owner.rpartition(".")[0]):
                lost.append(f"{name}: {target}")
    assert lost == []


def attribute(name):
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last) if module else import_module(name)


def test_the_reference_has_every_command_with_every_option(site_pages):
    text = site_pages.reference()["commands"]
    for name in cli.COMMANDS:
        part = text.partition(f".. program:: flipgrad {name}\n")[2].partition(".. program::")[0]
        for option in cli.command(name).params:
            shown = option.name.upper() if option.param_type_name == "argument" else option.opts[0]
            assert f".. option:: {shown}\n" in part, (name, shown)


def test_every_module_is_in_the_reference_or_inside(site_pages):
    found = {module.name for module in pkgutil.iter_modules(flipgrad.__path__) if not module.name.startswith("_")}
    assert found <= set(site_pages.MODULES) | site_pages.INSIDE


def test_every_public_name_has_a_docstring(site_pages):
    for name in flipgrad.__all__:
        assert getattr(flipgrad, name).__doc__, name


def test_the_papers_page_has_every_result(site_pages):
    text = site_pages.paper(DOCS / "results")
    for path in (DOCS / "results").glob("*.json"):
        assert f"results/{path.stem}.md" in text
        assert f"](results/{path.stem}.png)" in text
        record = json.loads(path.read_text())
        assert f"flipgrad reproduce {record['figure']} --scale {record['scale']}" in text
    assert "| claim | small, " in text


@pytest.mark.parametrize(("measured", "page"), [("noise_scales", "choose/noise.md"), ("sign_head", "guide/gradients.md")])
def test_tables_of_pages_are_those_of_the_measurements(monkeypatch, measured, page):
    monkeypatch.syspath_prepend(str(DOCS / "measure"))
    table = import_module(measured).table(DOCS / "measure" / f"{measured}.json")
    assert table in (DOCS / page).read_text(encoding="utf-8")


def test_outputs_through_a_sign_have_its_moments(monkeypatch):
    """With one layer, whose means are exact: outputs near ±1 of the mean and the variance of a sign."""
    monkeypatch.syspath_prepend(str(DOCS / "measure"))
    rule = import_module("sign_head").SignHead(flipgrad.ADF())
    net = flipgrad.Sequential(flipgrad.BinaryLinear(2, 4), head=torch.nn.Linear(4, 3)).double()
    x, seen = torch.randn(1, 2, dtype=torch.float64).expand(20_000, 2), []
    net(x, lambda outputs: seen.append(outputs.detach()) or outputs.sum(-1), estimator=rule)
    m = net[0].noise.mean_sign(net[0].affine()(x[:1]))
    v = (1 - m**2) @ (net.head.weight**2).T
    mean = torch.tanh(net.head(m) / (1 + v / (torch.pi**2 / 3)).sqrt() / 2).detach()
    # Five standard errors.
    assert ((seen[0].mean(0) - mean).abs() < 5 * ((1 - mean**2) / len(x)).sqrt()).all()
    torch.testing.assert_close(seen[0].var(0)[None], 1 - mean**2, rtol=5 * (2 / len(x)) ** 0.5, atol=0)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            generated = (
                target.relative_to(DOCS).parts[0] in NOT_WRITTEN | {"paper.md"} if target.is_relative_to(DOCS) else False
            )
            assert link.startswith("https://") or generated or target.exists(), f"{page}: {link}"
            if generated and "lesson_" in link:
                assert (DOCS / "lessons" / f"{target.name}.py").exists(), f"{page}: {link}"
