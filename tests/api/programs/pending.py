"""Programs that are not right yet, by name or `name (mode)`, and why; a reason that begins with "hangs" is not run.

Empty when issue 15 is done: whoever mends one of these takes it out.
"""

from __future__ import annotations

PENDING: dict[str, str] = {}
