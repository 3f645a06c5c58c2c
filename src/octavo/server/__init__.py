"""The HTTP server: OpenAI's routes over an EngineClient. Knows the client, the tokenizer and the base, and nothing of the engine."""
