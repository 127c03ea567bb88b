"""The certificate of HTTP, for gRPC. New files are taken into use by the connections that come after them."""

import logging
from pathlib import Path

import grpc

from headrace.gateway.certificate import Certificate

_LOG = logging.getLogger("headrace.gateway")


class Credentials:
    """Files that do not fit are left, and said so once. Asked at every handshake, from a thread of gRPC's."""

    def __init__(self, cert: str, key: str) -> None:
        self._paths = (Path(cert), Path(key))
        self._certificate = Certificate(cert, key)
        self.server: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(self._read(), self._changed)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """None: the ones before."""
        try:
            return self._read() if self._certificate.reload_if_changed() else None
        except OSError as error:
            _LOG.error("the new TLS files cannot be read, the old ones stay: %s", error)
            return None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        cert, key = self._paths
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), cert.read_bytes())])
