"""reports/claims/README.md, from the TOML files beside it and the figures of the pages: python -m reports.claims.

Half a minute: it trains nothing.
"""

from reports.claims.register import HERE, render

if __name__ == "__main__":
    (HERE / "README.md").write_text(render(), encoding="utf-8")
