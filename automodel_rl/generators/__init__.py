"""Generators: what writes completions, in which process and on which device, how it is started and supervised."""
