"""`python -m paceline`, for where the `paceline` command is not on the path."""

import sys

from paceline.cli.main import main

sys.exit(main())
