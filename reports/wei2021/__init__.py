"""The tables and figures of Wei and Liu 2021 on dynamic privacy parameters, beside ours.

paper: what the paper prints; accounts: its accounts, computed again; training: runs on MNIST; page:
what is written of them.
"""
