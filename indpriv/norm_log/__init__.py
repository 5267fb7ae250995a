"""What a run did to each example's gradient: the log that recording writes and accounting reads. Sensitive."""

from indpriv.norm_log.norm_log import NormLog

__all__ = ["NormLog"]
