"""The OpenAI-compatible server: bodies to requests, tokens to responses, and HTTP around both."""
