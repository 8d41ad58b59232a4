"""The slash commands of the chat: what each one does, for the full-screen and the plain chat alike."""
