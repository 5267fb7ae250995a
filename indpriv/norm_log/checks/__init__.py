"""Compare what a run recorded with what an account of it assumes."""
