"""Rollouts: prompts go to generators, rewards score completions, and groups become rows of a batch."""
