"""The programs that users write, as a table: each equal to plain PyTorch, or refused with a text that is asserted.

`tests/api/test_programs.py` runs them on one, two and three workers; `pending.py` names those that are not right yet.
"""

from __future__ import annotations

from programs import autograd, data, loops, models, optimizers
from programs.program import Program

TABLES = (models.PROGRAMS, optimizers.PROGRAMS, data.PROGRAMS, autograd.PROGRAMS, loops.PROGRAMS)
PROGRAMS: dict[str, Program] = {name: program for table in TABLES for name, program in table.items()}
assert len(PROGRAMS) == sum(map(len, TABLES)), "two programs have one name"
