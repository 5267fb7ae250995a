"""An Opacus run: what it is doing, read from its own objects, checked once and watched while it trains."""
