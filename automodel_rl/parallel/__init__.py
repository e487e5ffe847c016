"""Layouts: meshes, differentiable collectives, pipelines, gradients over ranks."""
