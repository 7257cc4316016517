"""What the measurements share: models, engines, child processes, result files and their readers."""
