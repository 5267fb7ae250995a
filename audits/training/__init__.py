"""Reference DP-SGD runs: data sets and audit files, models and the training loop.

Importing this package imports no torch; neither do `config` and `datasets`. The other modules do.
"""
