"""Layouts: meshes, what works together, collectives with a backward, pipelines, gradients over ranks."""
