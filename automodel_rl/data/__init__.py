"""Datasets, chat templates and resumable loading."""
