"""Episodes: conversations of several turns, in which tools or an environment answer the model."""
