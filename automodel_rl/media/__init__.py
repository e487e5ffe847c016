"""Readers of the images, videos and audio of chats, in the form that encoders take.

Files that cannot be read or used raise InputError. `where` is a record's location, for its message. Readers are
picklable, since they are sent with media to the ranks that encode them.
"""
