"""Layouts: meshes, collectives with a backward, pipelines, gradients over ranks."""
