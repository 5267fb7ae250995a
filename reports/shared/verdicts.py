"""The words in which a page judges a finding of a paper."""

REPRODUCED, NOT_REPRODUCED, DIFFERS, NOT_RUN = "reproduced", "not reproduced", "differs", "not run"
WORDS = (REPRODUCED, DIFFERS, NOT_REPRODUCED, NOT_RUN)
