"""Project files: YAML files that describe a run, validated strictly and resolved to typed settings."""

from __future__ import annotations

from paceline.cli.config.errors import ConfigError
from paceline.cli.config.project import Project, load_project
from paceline.cli.config.show import show

__all__ = ["ConfigError", "Project", "load_project", "show"]
