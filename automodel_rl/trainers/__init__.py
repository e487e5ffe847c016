"""Training programs of the algorithms, and the code they share."""
