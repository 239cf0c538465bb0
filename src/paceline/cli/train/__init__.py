"""`paceline train`: a run from a project file."""

from __future__ import annotations

from paceline.cli.train.arguments import add_parser

__all__ = ["add_parser"]
