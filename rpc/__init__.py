"""Paceline over gRPC: protos, generated stubs, servers, clients, and one error table."""
