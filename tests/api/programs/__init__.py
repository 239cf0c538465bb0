"""The programs that users write, as a table: each equal to plain PyTorch, or refused with a text that is asserted.

`tests/api/test_programs.py` runs them on one, two and three workers.
"""

from __future__ import annotations

from programs import autograd, data, loops, models, optimizers
from programs.program import Program

TABLES = {
    module.__name__.removeprefix("programs."): module.PROGRAMS for module in (models, optimizers, data, autograd, loops)
}
PROGRAMS: dict[str, Program] = {name: program for table in TABLES.values() for name, program in table.items()}
assert len(PROGRAMS) == sum(map(len, TABLES.values())), "two programs have one name"
