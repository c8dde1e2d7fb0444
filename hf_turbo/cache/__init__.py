"""Where keys and values live: blocks, their owners, and the cache that Transformers sees."""
