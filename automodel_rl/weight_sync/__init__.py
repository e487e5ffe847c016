"""Weight sync: sends the trained weights from the ranks that own them to the generators, in packed buffers."""
