"""From settings to an executor with a loaded model."""
