"""Real clients against a real worker: the official openai client, AIPerf, GuideLLM and SGLang's adaptive load."""
