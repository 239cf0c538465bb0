"""`paceline watch`: a page that shows runs while they train, and the same data for programs."""

from paceline.cli.watch.command import add_parser as add_parser
