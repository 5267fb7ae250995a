"""The log of a run: recording writes it, accounting reads it. Sensitive."""

from indpriv.norm_log.norm_log import NormLog

__all__ = ["NormLog"]
