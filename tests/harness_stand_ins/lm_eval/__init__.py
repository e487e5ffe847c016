"""A stand-in for the harness of this name, which calls the endpoint as that does."""
