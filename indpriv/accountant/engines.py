"""The accountants by name: where a new one is registered."""

from __future__ import annotations

from indpriv.accountant.engine import Engine
from indpriv.accountant.pld.engine import PldEngine
from indpriv.accountant.rdp_engine import RdpEngine

ENGINES: dict[str, type[Engine]] = {"rdp": RdpEngine, "pld": PldEngine}
