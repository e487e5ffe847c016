"""Public chat APIs: what their requests ask for, and how answers are written. They know no model."""
