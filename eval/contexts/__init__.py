"""Questions about long contexts, answered from compressed caches."""
