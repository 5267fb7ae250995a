"""Reference DP-SGD runs: data sets and audit files, models and the training loop.

Importing this package imports no torch; neither does `datasets`. The other modules do.
"""
