"""Analysis: from EpsilonTable, ExampleTable and AttackScores to findings, as plain data.

Sensitive.
"""
