"""reports/claims/README.md, from the TOML files beside it and the figures of the pages: python -m reports.claims.

Half a minute: it trains nothing. Its counts are written into reports/README.md, too.
"""

import re

from reports import REPORTS
from reports.claims.register import HERE, counts, render

if __name__ == "__main__":
    (HERE / "README.md").write_text(render(), encoding="utf-8")
    index = REPORTS / "README.md"
    index.write_text(
        re.sub(
            r"of \d+ claims [^|]+ not run", counts(), index.read_text(encoding="utf-8"), count=1
        ),
        encoding="utf-8",
    )
