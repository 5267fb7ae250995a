"""An Opacus run: read from its own objects, checked once, and watched while it trains."""
