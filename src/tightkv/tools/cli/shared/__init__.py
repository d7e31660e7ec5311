"""What several commands share: config flags, output, progress, and JSON configs of servers."""
