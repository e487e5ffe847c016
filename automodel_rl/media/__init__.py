"""Reads pictures, videos and audio of chats in the form that encoders take."""
