"""What a cache does to answers, one module per kind of task; `base` says what a task is."""
