"""The tables of Wei et al. 2021 on federated learning (Fed-SDP, Fed-CDP), beside ours.

paper: what the paper prints; accounts: its accounts, computed again, and what its runs are worth;
proposition: its Proposition 2 on a small network; training: runs;
cost: of a local step; leakage: pictures from gradients; page: what is written of them.
"""
