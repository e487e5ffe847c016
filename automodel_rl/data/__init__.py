"""Datasets, chat templates and resumable data loading.

Invalid data raise InputError. `where` is a record's location, such as file and line, for its message.
"""
