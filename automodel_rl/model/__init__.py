"""The model on its layout: loading, forward, log-probabilities, saving."""
