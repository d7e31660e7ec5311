"""What `tightkv eval` measures, and how much of it."""

TASKS = ("quality", "free", "needles")
# option -> default, with --quick, least, help
SIZES = {
    "window": (2048, 512, 3, "tokens of a window"),
    "windows": (8, 2, 1, "windows, spread evenly over the texts"),
    "prefill": (256, 128, 1, "first tokens of a window, not scored"),
    "chunk": (16, 16, 1, "tokens a forward pass after that"),
    "batch": (8, 8, 1, "windows or prompts at a time"),
    "needles": (5, 5, 1, "facts hidden in a context"),
    "prompts": (8, 4, 1, "prompts to continue"),
    "prompt_tokens": (512, 384, 2, "tokens of such a prompt"),
    "new_tokens": (64, 32, 1, "tokens to continue it by"),
}
