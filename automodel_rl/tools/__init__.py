"""Commands that look at a layout: verify proves it, plan sizes it."""
