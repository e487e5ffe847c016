"""Weight sync: sends trained weights from the ranks that own them to generators, in packed buffers."""
