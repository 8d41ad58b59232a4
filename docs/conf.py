"""Sphinx configuration. `scripts/docs` builds the site into build/docs, without network access."""

from importlib.metadata import version as installed_version

project = "edgespec"
author = "the edgespec authors"
version = release = installed_version("edgespec")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "edgespec"
html_copy_source = False
html_show_sourcelink = False
