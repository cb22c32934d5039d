"""OpenAI's Responses API: requests read, answers and streams written and kept, and those of engines that speak it."""
