"""The figures and tables of Yu et al. 2023 (arXiv:2206.02617v7), one by one, beside those of our audits.

paper: what the paper prints; measured: what has to be run or drawn, kept in yu2023.json; audits: what each audit says;
rules: when a finding counts as reproduced; figures, tables: one section each; page: the pages made of them.
"""
