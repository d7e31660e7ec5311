"""Speed, as ratios within one run: ours against the best of the others on the same shapes."""
