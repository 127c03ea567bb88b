"""The faces, HTTP, WebSocket and gRPC: routes with authentication inside, schemas, dialects, streams to clients, pages."""
