"""`paceline plan`: predicts how fast some hardware will train."""

from __future__ import annotations

from paceline.cli.plan.arguments import add_parser

__all__ = ["add_parser"]
