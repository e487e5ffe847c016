"""A training service: ranks of any layout behind an HTTP server that speaks the API of the client `tinker`."""
