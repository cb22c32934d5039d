"""What recorded requests would have hit and cost under other caches, policies, prompts or prices."""
