"""Headrace: a multi-tenant inference server that schedules tokens, not requests."""

__version__ = "0.1.0"
