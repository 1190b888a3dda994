"""KV blocks in files, which outlive the process: the files below the prefix cache."""
