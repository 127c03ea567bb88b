"""Typed messages between processes: how they are framed, bounded and carried. Knows no message's meaning.

A network (`unix`, `tls`, `memory`) makes links; `core.ports` says what they promise.
"""
