"""A second small model, with attention sinks and heads that look at the newest tokens: trained, measured, described."""
