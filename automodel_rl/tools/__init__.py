"""Commands other than training: configs, layouts, checkpoints and the installation."""
