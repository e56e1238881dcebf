"""The names of what a run may minimise."""

from __future__ import annotations

from typing import Annotated

from sheepop.core.names import Names

OBJECTIVE_NAMES = Names("next_token")
ObjectiveName = Annotated[str, OBJECTIVE_NAMES]
