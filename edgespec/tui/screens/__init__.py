"""What opens over the chat: loading, help, system prompt, settings, a question."""
