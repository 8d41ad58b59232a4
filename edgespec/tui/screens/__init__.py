"""The other screens of the terminal chat: loading, help, system prompt, settings and confirmation."""
