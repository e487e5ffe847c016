"""Rollouts: prompts go to generators, rewards score completions, and groups become sequences of a batch."""
