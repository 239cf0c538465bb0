"""`paceline logs`: list, summarize and plot runs."""

from paceline.cli.logs.command import add_parser as add_parser
