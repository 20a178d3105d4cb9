"""How Sphinx builds the site: ``make docs`` writes it to ``docs/build/html``, without a network and with warnings as errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import site_pages  # noqa: E402

import flipgrad  # noqa: E402

project = "flipgrad"
author = copyright = "The flipgrad developers"  # noqa: A001
version = release = flipgrad.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    # MathJax from a package: formulas show without a network, while reading as while building.
    "sphinx-mathjax-offline",
]
nitpicky = True
exclude_patterns = [
    "build",
    "results/cells",
    "lessons",
    "tutorials/*.py",
    "tutorials/*.ipynb",
    "tutorials/*.md5",
    "**/sg_execution_times.rst",
]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

# Other projects' pages are on the network, and their names are known without.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|nn|matplotlib|rich|typer|collections|pathlib|typing|types|abc|dataclasses)(\..*)?"),
    (r"py:.*", r"(Tensor|Generator|Module|Parameter|Figure|NDArray|optional|Callable|Sequence|Mapping|Iterable|Any)"),
]

html_theme = "furo"
html_title = "flipgrad"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "lessons",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"lesson_",
    "ignore_pattern": r"__init__",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 1e9,
    "abort_on_example_error": True,
    "plot_gallery": True,
    # What is shown is what a tutorial prints.
    "capture_repr": (),
    # Its page of times would load scripts from the network.
    "write_computation_times": False,
    "matplotlib_animations": False,
    "image_srcset": ["2x"],
    "default_thumb_file": str(HERE / "demo.png"),
}
suppress_warnings = ["config.cache"]

site_pages.write(HERE)


def setup(app):
    """Names of the package that exist are no mistakes, also where the reference does not have them."""
    app.connect(
        "warn-missing-reference",
        lambda app, domain, node: site_pages.is_inside(node["reftarget"], node.get("py:module")) or None,
    )
