"""Reference experiments: `python -m audits` in a clone. They train on public data sets.

They are built on indpriv, which never imports them, and are not in its wheel. README.md says what
each audit file beside this one is, and what it found.
"""
