"""The header and the counts of logs that benchmarks write by the package's own writer, of no real run."""

from indpriv.norm_log.session_counts import Conversion, SessionCounts
from indpriv.norm_log.writer import LogHeader

HEADER = LogHeader(
    rounding=0.01,
    rounding_mode="up",
    unit="example",
    neighbouring="add_remove",
    sampler="poisson",
    individually_clipped=False,
    norm_pass={"caveats": []},
)
COUNTS = SessionCounts(
    from_step=0,
    seeded=False,
    caveats=(),
    sampler="poisson",
    converted=Conversion(source="made up"),
)
