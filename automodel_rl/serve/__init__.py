"""Training service: ranks of any layout behind an HTTP server with the API of the `tinker` client."""
