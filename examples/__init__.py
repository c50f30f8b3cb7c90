"""Runnable examples: a small GPT under torchrun, and the demo that proves what ucformat promises."""
