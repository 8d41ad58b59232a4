"""The screens over the chat: loading, help, system prompt, settings and confirmation."""
