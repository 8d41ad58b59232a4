"""The slash commands of the chat, shared by the full-screen and the plain chat."""
