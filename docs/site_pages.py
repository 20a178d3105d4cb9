"""The pages of the site that are made from the package: the reference, and the paper's figures beside ours."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

import flipgrad
from flipgrad import cli

# The pages of the names of ``flipgrad`` itself: title, introduction and the modules whose names they hold.
NAMES = {
    "networks": (
        "Layers and networks",
        "What a network is made of. Everything here is a name of `flipgrad`: `import flipgrad as fg`.",
        ("layers", "network", "graph", "residual", "steps", "max_pooling", "norms"),
    ),
    "noise": ("Noise", "The distributions of Z in `sign(a - Z)`.", ("noise",)),
    "objectives": ("Objectives", "What maps outputs `[..., K]` to losses `[...]`.", ("objectives",)),
    "estimators": (
        "Estimators",
        "Any of them can stand in for another; [how to choose](../choose/estimator.md) says when to.",
        ("estimators",),
    ),
    "latent": ("Latent-variable models", "Models with binary latents, trained by the evidence lower bound.", ("latent",)),
    "costs": ("Costs", "What a network costs as it is, and in bits.", ("costs",)),
}
# The public modules, with their titles, in the order of the reference.
MODULES = {
    "exact": "The exact expectation",
    "bounds": "Sampled losses and bounds",
    "latent": "Latent-variable models",
    "gradeval": "How good is a gradient",
    "estimators": "Estimators by name",
    "flips": "Sums over flips",
    "training": "Training",
    "data": "Data sets",
    "zoo": "Trained networks",
    "packed": "Packed networks",
    "packed.c_source": "Packed networks as C code",
    "export": "Export to other programs",
    "plots": "Figures",
    "reproduce": "The paper's experiments",
    "contract": "For authors of estimators",
}
# Classes and modules inside that docstrings of public names point to.
INSIDE_NAMES = (
    "network.StochasticModel",
    "network.BinaryNetwork",
    "objectives.AdditiveObjective",
    "objectives.LinearHeadObjective",
    "affine.AffineMap",
    "jets.Jets",
)
INSIDE_MODULES = (
    "record",
    "max_pooling",
    "residual",
    "jets",
    "flips.averaging",
    "flips.choice",
    "flips.heads",
    "gradeval.statistics",
    "native.sampling",
)
# Modules that are inside: what they hold is public by another name, or not at all.
INSIDE = {
    *(
        "affine",
        "benchmarks",
        "binary_weights",
        "cli",
        "connections",
        "costs",
        "errors",
        "files",
        "graph",
        "guards",
        "image_files",
        "jets",
    ),
    *("layers", "machine", "max_pooling", "memory", "native", "network", "noise", "norms", "objectives", "pooling", "record"),
    *("residual", "sampling", "steps", "tensor_files", "user_code"),
}


def exists(module: str) -> bool:
    """Whether the package has that module, or what it is in."""
    return module.partition(".")[0] in {found.name for found in pkgutil.iter_modules(flipgrad.__path__)}


def is_inside(target: str, module: str | None = None) -> bool:
    """Whether a name that docstrings or signatures mention is one of the package, which need not be in the reference.

    It may be that of an attribute of ``module``, or of an error. A name that does not exist is a mistake.
    """
    for name in (target, f"{module}.{target}", f"flipgrad.errors.{target}"):
        parts = name.split(".")
        found: object = flipgrad if parts[0] == "flipgrad" else None
        for number, part in enumerate(parts[1:], 2):
            if found is not None and not hasattr(found, part):
                with suppress(ImportError):
                    import_module(".".join(parts[:number]))
            found = getattr(found, part, None)
        if found is not None:
            return True
    return False


def public_names(module: ModuleType) -> list[str]:
    """What a module offers: its ``__all__`` or, without one, what it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    defined = [name for name, found in vars(module).items() if getattr(found, "__module__", None) == module.__name__]
    return [name for name in defined if not name.startswith("_")]


def own_names() -> dict[str, list[str]]:
    """The names of ``flipgrad`` itself that are no modules, by page. Those of a new module come to the page of networks."""
    pages: dict[str, list[str]] = {page: [] for page in NAMES}
    for name in flipgrad.__all__:
        home = flipgrad._HOMES.get(name)
        if home is not None:
            module = home.removeprefix("flipgrad.")
            page = next((page for page, (_, _, modules) in NAMES.items() if module in modules), module)
            pages.setdefault(page, []).append(name)
    return pages


def module_names(name: str) -> list[str]:
    """The names of a public module that the reference does not have under ``flipgrad`` already."""
    module = import_module(f"flipgrad.{name}")
    return [each for each in public_names(module) if each not in flipgrad.__all__]


def directive(module: str, name: str) -> str:
    """What makes Sphinx document a name."""
    found = getattr(import_module(module), name)
    # An alias of a type, like Objective, is data.
    kind = "class" if inspect.isclass(found) else "function" if inspect.isroutine(found) else "data"
    if kind == "data":
        # Its docstring would be that of its type: the comment above it in the source says what it is.
        return f".. data:: {module}.{name}\n\n   {comment_of(module, name)}"
    return f".. auto{kind}:: {module}.{name}"


def comment_of(module: str, name: str) -> str:
    """The comment above the definition of a constant, which may be in a module further in."""
    folder = Path(flipgrad.__file__).parent / module.removeprefix("flipgrad").replace(".", "/").strip("/")
    sources = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    for source in sources:
        found = re.search(rf"((?:^# .*\n)+)^{name}\b[^\n]*=", source.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return " ".join(line.removeprefix("# ") for line in found[1].splitlines()).replace("`", "``").replace("````", "``")
    raise LookupError(f"{module}.{name} has no comment above its definition that says what it is")


def underlined(title: str, sign: str = "=") -> str:
    """A title of a page in reStructuredText."""
    return f"{title}\n{sign * len(title)}\n"


def reference() -> dict[str, str]:
    """The pages of the reference by name, in reStructuredText."""
    pages: dict[str, str] = {}
    for page, names in own_names().items():
        title, words, _ = NAMES.get(page, (page.capitalize(), "", ()))
        parts = [directive("flipgrad", name) for name in names]
        pages[page] = "\n\n".join([underlined(title), _rest(words), *parts]) + "\n"
    for name, title in MODULES.items():
        if exists(name):
            module = f"flipgrad.{name}"
            listed = [f".. automodule:: {module}\n   :no-members:", *(directive(module, each) for each in module_names(name))]
            pages[f"module-{name}"] = "\n\n".join([underlined(f"{title}: {module}"), *listed]) + "\n"
    inside = [f".. automodule:: flipgrad.{name}\n   :no-members:" for name in INSIDE_MODULES if exists(name)]
    inside += [f".. autoclass:: flipgrad.{name}" for name in INSIDE_NAMES]
    words = "Parts that public names mention; they may change from one version to the next."
    pages["inside"] = "\n\n".join([underlined("Inside"), words, *inside]) + "\n"
    pages["errors"] = f"{underlined('Errors')}\n.. autoexception:: flipgrad.InputError\n"
    pages["commands"] = commands()
    own = "\n".join(f"   {page}" for page in [*own_names(), "errors", "commands", "inside"])
    modules = "\n".join(f"   module-{name}" for name in MODULES if exists(name))
    pages["index"] = (
        f"{underlined('Reference')}\nEvery public name, from its docstring. Names of ``flipgrad`` itself (``import flipgrad as "
        f"fg``):\n\n.. toctree::\n   :maxdepth: 1\n\n{own}\n\nIts modules:\n\n.. toctree::\n   :maxdepth: 1\n\n{modules}\n"
    )
    return pages


def commands() -> str:
    """The page of all commands with all their options, as ``--help`` tells them."""
    parts = [underlined("Commands"), "What ``flipgrad COMMAND --help`` prints; :doc:`/command_line` has examples."]
    for name in cli.COMMANDS:
        command = cli.command(name)
        given = [each for each in command.params if each.param_type_name == "argument"]
        usage = " ".join(["flipgrad", name, *(each.name.upper() for each in given)])
        parts += [underlined(usage, "-"), *map(_literal, command.help.split("\n\n")), f".. program:: flipgrad {name}"]
        parts += [f".. option:: {each.name.upper()}\n\n   {_literal(each.help)}" for each in given]
        for option in (each for each in command.params if each not in given):
            shown = option.show_default if isinstance(option.show_default, str) else option.default
            default = "" if shown is None or shown is False else f" Default: ``{shown}``."
            parts.append(f".. option:: {', '.join(option.opts)}\n\n   {_literal(option.help)}{default}")
    return "\n\n".join(parts) + "\n"


def _literal(text: str) -> str:
    """A text of ``--help`` in reStructuredText: no letter has another meaning, and options keep their two dashes."""
    # Brackets are escaped for the terminal's markup.
    escaped = re.sub(r"([\\*`|_])", r"\\\1", text.replace(r"\[", "["))
    return re.sub(r"(?<!\w)--[\w-]+", r"``\g<0>``", escaped)


def _rest(text: str) -> str:
    """A line of Markdown in reStructuredText, as far as the introductions need it."""
    text = re.sub(r"\[([^]]+)\]\(([^)]+)\.md\)", r":doc:`\1 <\2>`", text)
    return re.sub(r"(?<![:`>])`([^`<]+)`(?!`)", r"``\1``", text)


def paper(results: Path) -> str:
    """The page of the paper's figures: what the paper shows, ours, and which claims hold, from the files of ``results``."""
    from flipgrad.reproduce.experiments import in_the_papers_order

    parts = []
    for experiment in in_the_papers_order():
        for stem in dict.fromkeys(map(experiment.stem, experiment.efforts())):
            path = results / f"{stem}.json"
            if path.is_file():
                record = json.loads(path.read_text(encoding="utf-8"))
                parts.append(_figure(experiment, stem, record, results))
    return PAPER + "\n".join(parts)


def _figure(experiment: object, stem: str, record: dict[str, object], results: Path) -> str:
    from flipgrad.reproduce._workshop import Sheet
    from flipgrad.reproduce.experiments import BY_SCALE

    place, title = experiment.place, str(record["title"])
    other = f", {record['scale']} scale" if stem != experiment.name else ""
    lines = [f"## {place or 'Beyond'}: {title.partition(': ')[2] or title}{other}\n"]
    if not other:
        lines += ["**The paper.** " + experiment.words + "\n" if place else experiment.words + "\n"]
    lines.append("**Ours.**\n")
    for figure, caption in {stem: title, **experiment.captions(str(record["scale"]))}.items():
        if (results / f"{figure}.png").is_file():
            lines.append(f"![{caption}](results/{figure}.png)\n")
    for sheet in record.get("sheets", []):
        if sheet["caption"] == BY_SCALE and not other:
            lines.append(f"{Sheet(**sheet)}\n")
    claims = record["claims"]
    shown = claims if len(claims) <= 8 else claims[:8]
    for claim in shown:
        verdict = {True: "Holds", False: "Does not hold", None: "Undecided"}[claim["holds"]]
        lines.append(f"- **{verdict}**: {claim['text']}. {claim['numbers']}")
    if len(claims) > len(shown):
        lines.append(f"- and {len(claims) - len(shown)} more, with tables: [all of it](results/{stem}.md)")
    command = f"flipgrad reproduce {experiment.name} --scale {record['scale']}"
    return "\n".join([*lines, "", f"Made by `{command}`; [text and tables](results/{stem}.md).", ""])


PAPER = """# The paper, figure by figure

> Shekhovtsov, Yanush, Flach. *Path Sample-Analytic Gradient Estimators for Stochastic Binary Networks.* NeurIPS 2020.

For each of its figures: what the paper shows there, our figure, and which of the claims our numbers bear out. Everything is
made from the result files in `docs/results`, and these by `flipgrad reproduce`, whose `--scale paper` has the paper's sizes.
The same as one page in a file is `docs/results/report.html`, which `flipgrad reproduce report` writes.

```{toctree}
:hidden:
:glob:

results/*
```

"""


def write(folder: Path) -> None:
    """Write all these pages below ``folder``."""
    (folder / "reference").mkdir(exist_ok=True)
    for name, text in reference().items():
        _write(folder / "reference" / f"{name}.rst", text)
    _write(folder / "paper.md", paper(folder / "results"))


def _write(path: Path, text: str) -> None:
    # What did not change is not read again.
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
