"""Anthropic's Messages API: requests read, answers and streams written, and those of engines that speak it followed."""
