"""Sphinx: `make docs` builds the site into build/docs."""

from __future__ import annotations

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import tightkv

project = "tightkv"
release = tightkv.__version__
author = copyright = "the tightkv authors"

extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"tightkv {release}"
html_extra_path = ["planner.html"]
html_copy_source = False

# The sidebar. A page that is missing here fails the build.
CONTENTS = {
    "Use it": "quickstart presets python paged vllm export plan config troubleshooting",
    "Commands": "generate eval doctor calibrate bench validate info",
    "How it works": "how-it-works math layout kernels cpu security",
    "What was measured": "results comparison log measurements",
}


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """index.md is read on its own, too: only the site has a table of contents in it."""
    if page == "index":
        for caption, pages in CONTENTS.items():
            names = "\n".join(pages.split())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"


def _link_planner(app: Sphinx, tree: nodes.document) -> None:
    """planner.html is a page of the site, not a file to download."""
    for link in list(tree.findall(addnodes.download_reference)):
        if link["reftarget"] == "planner.html":
            link.replace_self(nodes.reference("", "", *link.children, refuri="planner.html"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_contents)
    app.connect("doctree-read", _link_planner, priority=100)  # before files are collected
