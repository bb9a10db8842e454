"""Sphinx: how the pages are built. Warnings are errors; see ``make docs``."""

project = "Toprope"
author = "The Toprope authors"
project_copyright = "The Toprope authors"

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "Toprope"
html_show_sphinx = False
