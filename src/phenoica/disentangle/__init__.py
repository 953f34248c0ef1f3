"""Views fitted on training batches only, and what each component carries."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phenoica.disentangle.views import View

__all__ = ["load_view", "view"]


def view(name: str, **options: Any) -> View:
    """Make an unfitted view by name; see `phenoica.disentangle.views.view`."""
    from phenoica.disentangle import views

    return views.view(name, **options)


def load_view(directory: str | os.PathLike) -> View:
    """Load a fitted view; see `phenoica.disentangle.views.load_view`."""
    from phenoica.disentangle import views

    return views.load_view(directory)
