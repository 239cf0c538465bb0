"""`paceline logs`: looking at runs."""

from __future__ import annotations

from paceline.cli.logs.command import add_parser

__all__ = ["add_parser"]
