"""The gRPC face: `headrace.v1.Inference`, as headrace.proto says it, and the health service."""
